"""Features extractor for Stable-Baselines3 with Lockstep's encoders, for networks that SB3 does not have.

SB3 imports this module by name when it loads such a file, so Lockstep must be installed as well.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import Space
from torch import Tensor, nn

from lockstep.nn.encoders import EncoderConfig, build_encoder
from lockstep.nn.normalization import normalize


class Features(nn.Module):
    """Observation normalizer and encoder. SB3 reads `features_dim`."""

    def __init__(self, space: Space[Any], encoder: dict[str, Any], moments: Sequence[tuple[str, int]] = ()) -> None:
        """Build the encoder. `moments` lists normalized parts of an observation and their sizes.

        Means and standard deviations are buffers, loaded with the weights.
        """
        super().__init__()
        settings = encoder | {"hidden_sizes": tuple(encoder["hidden_sizes"])}
        self.encoder = build_encoder(space, EncoderConfig(**settings))
        self.features_dim = int(self.encoder.features)  # type: ignore[arg-type]
        self.parts = [name for name, _ in moments]
        for index, (_, size) in enumerate(moments):
            self.register_buffer(f"mean{index}", torch.zeros(size))
            self.register_buffer(f"std{index}", torch.ones(size))

    def forward(self, obs: Any) -> Tensor:
        for index, name in enumerate(self.parts):
            mean, std = getattr(self, f"mean{index}"), getattr(self, f"std{index}")
            if name:
                obs = obs | {name: normalize(obs[name], mean, std)}
            else:
                obs = normalize(obs, mean, std)
        features: Tensor = self.encoder(obs)
        return features
