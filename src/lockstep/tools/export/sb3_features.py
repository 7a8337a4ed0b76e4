"""Lockstep's encoders for Stable-Baselines3: what an exported file names where SB3 has no such network itself.

SB3 imports this by name when it loads such a file, so lockstep must be installed beside it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import Space
from torch import Tensor, nn

from lockstep.nn.encoders import EncoderConfig, build_encoder
from lockstep.nn.normalization import normalize


class Features(nn.Module):
    """An encoder with the normaliser before it; SB3 asks it for `features_dim`."""

    def __init__(self, space: Space[Any], encoder: dict[str, Any], moments: Sequence[tuple[str, int]] = ()) -> None:
        """`moments` are the normalised parts of an observation and their sizes; the numbers come with the weights."""
        super().__init__()
        settings = encoder | {"hidden_sizes": tuple(encoder["hidden_sizes"])}
        self.encoder = build_encoder(space, EncoderConfig(**settings))
        self.features_dim = int(self.encoder.features)  # type: ignore[arg-type]
        self.parts = [name for name, _ in moments]
        for place, (_, size) in enumerate(moments):
            self.register_buffer(f"mean{place}", torch.zeros(size))
            self.register_buffer(f"std{place}", torch.ones(size))

    def forward(self, obs: Any) -> Tensor:
        for place, name in enumerate(self.parts):
            mean, std = getattr(self, f"mean{place}"), getattr(self, f"std{place}")
            if name:
                obs = obs | {name: normalize(obs[name], mean, std)}
            else:
                obs = normalize(obs, mean, std)
        features: Tensor = self.encoder(obs)
        return features
