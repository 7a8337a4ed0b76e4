"""A recipe of which a copy flips one bit of one reward: `write_recipe` writes it as a file of a user."""

from pathlib import Path

LANE = 3
"""Lane whose first environment gets the changed reward."""
ITERATION = 128
"""Samples per iteration; two updates each."""

_TEXT = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep import PPOConfig, Recipe, RunConfig, VecEnv
from lockstep.nn.encoders import EncoderConfig
from lockstep.protocols import Step
from gymnasium.spaces import Box, Discrete
import numpy as np


class Walk(VecEnv):
    """Points that move by -1, 0 or 1, with a reward near 0. Episodes have 10 steps."""

    @dataclass(frozen=True, kw_only=True)
    class Config(VecEnv.Config):
        num_envs: int = 16

    def setup(self):
        self.observation_space, self.action_space = Box(-9, 9, (2,), np.float32), Discrete(3)
        self.place = self.register_state("place", torch.zeros(self.num_envs, 2))
        self.flips = False

    def on_iteration_start(self, clock):
        self.flips = clock.iteration + 1 == FLIP

    def reset(self):
        return self.observations()

    def observations(self):
        return self.place.clone()

    def step(self, action):
        self.place[:, 0] += action - 1
        self.place[:, 1] += 1
        reward = -self.place[:, 0].abs() - 0.5
        if self.flips and LANE in self.lanes.local:
            row = (LANE - self.lanes.local.start) * self.envs_per_lane
            reward.view(torch.int32)[row] ^= 1 << BIT
            self.flips = False
        ended = self.place[:, 1] >= 10
        final = self.observations()
        self.place[ended] = 0
        return Step(self.observations(), reward, torch.zeros_like(ended), ended, final, {}, bool(ended.any()))


@dataclass(frozen=True, kw_only=True)
class Walking(Recipe):
    """PPO on points."""

    task: Walk.Config = Walk.Config()
    algo: PPOConfig = PPOConfig(
        rollout_steps=8, batch_size=64, epochs=1, encoder=EncoderConfig(hidden_sizes=(8,), num_layers=1)
    )
    run: RunConfig = RunConfig(
        total_samples=ITERATIONS * 128, log_every=128, eval_every=None, device="cpu", reduction="exact",
        digest_every=128, save_every=10**9, keep_every=KEEP, collective_timeout=60.0,
    )
    name: ClassVar = "walking"
    smoke_overrides: ClassVar = {}
'''


def write_recipe(path: Path, iterations: int, flip: int | None = None, keep: int | None = None, bit: int = 12) -> Path:
    """Write the recipe for some iterations.

    `flip` is the iteration with the changed reward, `bit` the bit that changes; the lowest one is lost when advantages
    are computed. `keep` is `run.keep_every`.
    """
    values = {"FLIP": flip, "LANE": LANE, "BIT": bit, "ITERATIONS": iterations, "KEEP": keep}
    path.write_text("".join(f"{name} = {value}\n" for name, value in values.items()) + _TEXT)
    return path
