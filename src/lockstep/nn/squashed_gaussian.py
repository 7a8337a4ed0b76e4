"""Gaussian action squashed by tanh, as a function of the outputs of an actor and of the noise that the caller draws.

Shapes: N samples, K action features. Outputs are [N, 2K]: means and log standard deviations, concatenated.
"""

import math

import torch.nn.functional as F
from torch import Tensor

LOG_STD_RANGE = (-20.0, 2.0)
"""Log standard deviations are clamped to this range, as in the implementation of the authors of SAC."""


def squashed_mode(outputs: Tensor) -> Tensor:
    """Return the action [N, K] of the mean, between -1 and 1."""
    return outputs.float().chunk(2, -1)[0].tanh()


def squashed_sample(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions [N, K] between -1 and 1 and their log probabilities [N], for standard normal noise [N, K].

    Gradients pass through both to the outputs (reparameterization).
    """
    mean, log_std = outputs.float().chunk(2, -1)
    log_std = log_std.clamp(*LOG_STD_RANGE)
    raw = mean + log_std.exp() * noise
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    # Change of variables: log(1 - tanh(x)^2), in a form that does not underflow for large |x|
    log_slope = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))
    return raw.tanh(), (gaussian - log_slope).sum(-1)
