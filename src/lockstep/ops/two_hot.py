"""Arithmetic of TD-MPC2: symlog, two-hot regression, discounts and value scale.

Hansen et al., 2023, arXiv:2310.16828.
"""

from functools import cache

import torch
from torch import Tensor


def symlog(x: Tensor) -> Tensor:
    """Symmetric logarithm: sign(x) log(1 + |x|)."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """Inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


def two_hot(values: Tensor, bins: int, vmax: float) -> Tensor:
    """Encode symlog(values) as weights of two neighboring bins, [..., bins], evenly spaced from -vmax to vmax."""
    position = (symlog(values).clamp(-vmax, vmax) + vmax) * ((bins - 1) / (2 * vmax))
    below = position.floor().clamp(max=bins - 2)  # the last bin is only an upper neighbor
    upper_weight = (position - below).unsqueeze(-1)
    weights = values.new_zeros(*values.shape, bins)
    index = below.long().unsqueeze(-1)
    weights.scatter_(-1, index, 1.0 - upper_weight)
    return weights.scatter_(-1, index + 1, upper_weight)


def two_hot_inverse(logits: Tensor, vmax: float) -> Tensor:
    """Decode logits of bins [..., bins] to values: symexp of the expected bin."""
    centers = torch.linspace(-vmax, vmax, logits.shape[-1], device=logits.device)
    return symexp(logits.float().softmax(-1) @ centers)


def two_hot_loss(logits: Tensor, values: Tensor, vmax: float) -> Tensor:
    """Cross-entropy between logits of bins [..., bins] and the two-hot encoding of values [...]."""
    weights = two_hot(values, logits.shape[-1], vmax)
    return -(weights * logits.float().log_softmax(-1)).sum(-1)


def discount_from_episode_length(length: float) -> float:
    """Choose a discount whose horizon is a fifth of an episode, between 0.95 and 0.995."""
    fifth = length / 5
    return min(max((fifth - 1) / fifth, 0.95), 0.995)


def percentile_range(values: Tensor) -> Tensor:
    """Return the range between the 5th and the 95th percentile of values [N], at least 1."""
    bounds = torch.quantile(values, _percentiles(values.dtype, values.device))
    return (bounds[1] - bounds[0]).clamp(min=1.0)


@cache
def _percentiles(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Percentiles, cached on the device because a copy to the device synchronizes the host."""
    return torch.tensor([0.05, 0.95], dtype=dtype, device=device)
