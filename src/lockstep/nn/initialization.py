"""Initialization of layers."""

from torch import nn


def orthogonal_init(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Linear | nn.Conv2d:
    """Initialize a layer with orthogonal weights and zero bias, as usual for PPO."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
