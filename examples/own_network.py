"""A network of your own, in one file: residual blocks for Snake. `lockstep train examples/own_network.py`

Shapes: N samples, C channels, D features.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from lockstep import PPOConfig, Recipe, RunConfig, SnakeConfig
from lockstep.nn.encoders import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class ResidualConfig(EncoderConfig):
    """Shape of a network with residual blocks."""

    share_encoder: bool | None = True
    """Policy and value share it."""
    channels: int = 16
    """Channels of every block."""
    blocks: int = 2
    """Residual blocks."""

    def build(self, space):
        return Residual(space, self)


class Residual(nn.Module):
    """A board to features. Plain torch: no wrapper, no process, and `features` says how wide it is."""

    def __init__(self, space, config):
        super().__init__()
        planes, height, width = space.shape
        self.first = nn.Conv2d(planes, config.channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Conv2d(config.channels, config.channels, 3, padding=1) for _ in range(config.blocks)
        )
        self.last = nn.Linear(config.channels * height * width, config.out_features)
        self.features = config.out_features

    def forward(self, obs):
        x = self.first(obs.float()).relu()  # [N, C, height, width]
        for block in self.blocks:
            x = x + block(x).relu()
        return self.last(x.flatten(1)).relu()  # [N, D]


@dataclass(frozen=True, kw_only=True)
class ResidualSnake(Recipe):
    """PPO on a board of five by five, with a network of our own."""

    task: SnakeConfig = SnakeConfig(size=5, num_envs=64)
    algo: PPOConfig = PPOConfig(rollout_steps=32, batch_size=512, encoder=ResidualConfig(out_features=64))
    run: RunConfig = RunConfig(total_samples=200_000, log_every=20_480, eval_every=51_200)
    smoke_overrides: ClassVar = {
        "task.num_envs": 16,
        "algo.batch_size": 128,
        "run": {"total_samples": 2048, "eval_every": 1024, "record_video": False},
    }
