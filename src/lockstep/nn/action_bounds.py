"""Conversion of actions between -1 and 1 to the bounds of an environment."""

import torch
from gymnasium import spaces
from torch import Tensor


class ActionBounds:
    """Linear map from vectors between -1 and 1 to the actions of a bounded one-dimensional Box."""

    def __init__(self, space: spaces.Box) -> None:
        self.bias = torch.from_numpy((space.high + space.low) / 2).float()
        self.scale = torch.from_numpy((space.high - space.low) / 2).float()

    def to_env(self, vector: Tensor) -> Tensor:
        """Return the actions of the environment for vectors [N, K]."""
        if self.scale.device != vector.device:  # once: a copy to a GPU synchronizes with it
            self.scale, self.bias = self.scale.to(vector.device), self.bias.to(vector.device)
        return vector * self.scale + self.bias
