"""A task of your own, in one file: catch what falls. `lockstep train examples/catch.py`

Shapes: E environments a lane, B local environments, lane after lane.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.protocols import Step
from lockstep.pytree import load_into
from lockstep.rng import RandomStream

ROW, COLUMN, PADDLE, EPISODE = range(4)


@dataclass(frozen=True, kw_only=True)
class CatchConfig:
    """Settings of Catch. Every number is for the whole run, not for one process."""

    height: int = 8
    """Rows that a ball falls through."""
    width: int = 7
    """Columns it may fall in."""
    num_envs: int = 64
    """Games played side by side."""

    def build(self, lanes, device):
        return Catch(self, lanes, device)


class Catch:
    """The games of the local lanes. The reward is 1 for a ball that was caught, and -1 for one that was not."""

    def __init__(self, config, lanes, device):
        self.config, self.lanes, self.device = config, lanes, device
        self.share = lanes.per_lane(config.num_envs, "num_envs")  # E
        self.num_envs = len(lanes) * self.share  # B
        self.observation_space, self.action_space = Box(0, 1, (3,), np.float32), Discrete(3)
        # A game is seeded by its place in the whole run: which process it is on, nobody here can know.
        places = [lane * self.share + env for lane in lanes.local for env in range(self.share)]
        self.streams = [RandomStream(lanes.seed, "catch", place) for place in places]
        self.state = torch.zeros(self.num_envs, 4, dtype=torch.int64)  # all there is to know of each game
        self.reset()

    def reset(self):
        self.state[:, EPISODE] = -1
        self._begin(torch.ones(self.num_envs, dtype=torch.bool))
        return self.observations()

    def _begin(self, games):
        """The next episode of some games; its ball is a pure function of game and episode, so none is ever saved."""
        self.state[games, EPISODE] += 1
        for game in games.nonzero().flatten().tolist():
            column = self.streams[game].draw_seed(int(self.state[game, EPISODE])) % self.config.width
            self.state[game, :EPISODE] = torch.tensor([0, column, self.config.width // 2])

    def observations(self):
        size = torch.tensor([self.config.height, self.config.width, self.config.width])
        return (self.state[:, :EPISODE] / size).to(self.device)  # [B, 3] float32

    def step(self, action):
        state = self.state
        state[:, PADDLE] = (state[:, PADDLE] + action.cpu() - 1).clamp(0, self.config.width - 1)
        state[:, ROW] += 1
        landed = state[:, ROW] == self.config.height - 1
        caught = landed & (state[:, COLUMN] == state[:, PADDLE])
        reward = caught.float() - (landed & ~caught).float()
        final_obs = self.observations()
        self._begin(landed)  # a game that ends goes on with its next episode at once
        never = torch.zeros_like(landed)
        told = (part.to(self.device) for part in (reward, landed, never))
        return Step(self.observations(), *told, final_obs, {"caught": caught.float()}, any_truncated=False)

    def on_iteration_start(self, clock):
        """The game is the same throughout the run; a curriculum would read the clock here."""

    def close(self): ...

    # What a checkpoint holds: nothing that all lanes share, and a few rows for each lane.

    def shared_state(self):
        return {}

    def load_shared_state(self, state): ...

    def lane_state(self, lane):
        return {"state": self.state[self.lanes.lane_slice(lane, self.share)].clone()}

    def load_lane_state(self, lane, state):
        load_into({"state": self.state[self.lanes.lane_slice(lane, self.share)]}, state, f"Catch, lane {lane}")

    # What `lockstep play` shows.

    def render_text(self, env):
        row, column, paddle, _ = self.state[env].tolist()
        board = [["."] * self.config.width for _ in range(self.config.height)]
        board[-1][paddle], board[row][column] = "=", "o"
        return "\n".join("".join(line) for line in board)

    def render(self, env):
        cells = np.array([[".=o".index(cell) for cell in line] for line in self.render_text(env).split("\n")])
        colours = np.array([[26, 29, 37], [90, 200, 120], [240, 170, 60]], np.uint8)
        return colours[cells].repeat(24, axis=0).repeat(24, axis=1)


@dataclass(frozen=True, kw_only=True)
class CatchPPO(Recipe):
    """PPO learns to catch."""

    task: CatchConfig = CatchConfig()
    algo: PPOConfig = PPOConfig(rollout_steps=32, batch_size=512)
    run: RunConfig = RunConfig(total_samples=100_000, log_every=10_240, eval_every=20_480)
    smoke_overrides: ClassVar = {
        "task.num_envs": 16,
        "algo.batch_size": 128,
        "run": {"total_samples": 2048, "eval_every": 1024, "record_video": False},
    }
