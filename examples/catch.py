"""A custom task in one file: catch the falling ball. `lockstep train examples/catch.py`"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from lockstep import PPOConfig, Recipe, RunConfig, VecEnv
from lockstep.protocols import Step

ROW, COLUMN, PADDLE, EPISODE = range(4)


class Catch(VecEnv):
    """Reward +1 for a caught ball, -1 for a missed one."""

    @dataclass(frozen=True, kw_only=True)
    class Config(VecEnv.Config):
        """Settings of Catch."""

        height: int = 8
        """Board rows."""
        width: int = 7
        """Board columns."""

    def setup(self) -> None:
        self.observation_space, self.action_space = Box(0, 1, (3,), np.float32), Discrete(3)
        self.streams = self.env_streams("catch")  # one per environment: the same draws on any number of processes
        self.state = self.register_state("state", torch.zeros(self.num_envs, 4, dtype=torch.int64))

    def reset(self) -> Tensor:
        self.state[:, EPISODE] = -1
        self._start_episode(torch.ones(self.num_envs, dtype=torch.bool))
        return self.observations()

    def _start_episode(self, done: Tensor) -> None:
        self.state[done, EPISODE] += 1
        for env in done.nonzero().flatten().tolist():
            column = self.streams[env].draw_seed(int(self.state[env, EPISODE])) % self.config.width
            self.state[env, :EPISODE] = torch.tensor([0, column, self.config.width // 2])

    def observations(self) -> Tensor:
        size = torch.tensor([self.config.height, self.config.width, self.config.width])
        return (self.state[:, :EPISODE] / size).to(self.device)  # [B, 3]

    def step(self, action: Tensor) -> Step:
        state = self.state
        state[:, PADDLE] = (state[:, PADDLE] + action.cpu() - 1).clamp(0, self.config.width - 1)
        state[:, ROW] += 1
        landed = state[:, ROW] == self.config.height - 1
        caught = landed & (state[:, COLUMN] == state[:, PADDLE])
        reward = caught.float() - (landed & ~caught).float()
        final_obs = self.observations()
        self._start_episode(landed)
        outcome = (x.to(self.device) for x in (reward, landed, torch.zeros_like(landed)))
        return Step(self.observations(), *outcome, final_obs, {"caught": caught.float()}, any_truncated=False)

    def render_text(self, env: int) -> str:
        row, column, paddle, _ = self.state[env].tolist()
        board = [["."] * self.config.width for _ in range(self.config.height)]
        board[-1][paddle], board[row][column] = "=", "o"
        return "\n".join("".join(line) for line in board)


@dataclass(frozen=True, kw_only=True)
class CatchPPO(Recipe):
    """PPO on Catch."""

    task: Catch.Config = Catch.Config()
    algo: PPOConfig = PPOConfig(rollout_steps=32, batch_size=512)
    run: RunConfig = RunConfig(total_samples=100_000, log_every=10_240, eval_every=20_480)
    smoke_overrides: ClassVar[dict[str, Any]] = {"task.num_envs": 16, "algo.batch_size": 128, "run.total_samples": 2048}
