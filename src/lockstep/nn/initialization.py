"""Initialisation of parameters, without touching anybody's global random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.rng import RandomStream


@contextmanager
def seeded_init(stream: RandomStream) -> Iterator[None]:
    """Inside, modules are initialised from a stream that all lanes share; outside, nothing has happened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream.draw_seed(0))
        yield


def orthogonal_init(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    """Orthogonal weights and zero bias, as PPO likes them."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
