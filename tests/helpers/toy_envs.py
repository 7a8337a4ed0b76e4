"""Toy environments without physics: points moved by actions, in episodes that end at random; one or several tasks."""

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.spaces import Box, Dict

from lockstep.lanes import Lanes
from lockstep.protocols import Step, SubtaskSpec
from lockstep.rng import RandomStream

FEATURES = 4


@dataclass(frozen=True, kw_only=True)
class ToyWorldsConfig:
    """With several tasks, environment i has task i modulo `num_tasks`; task k has k + 1 action features."""

    num_envs: int = 8
    num_tasks: int = 1
    length: int = 30
    ends: float = 0.1
    """Probability that a step ends the episode."""
    pixels: bool = False
    """Observe an image, a pattern that depends on the state."""

    def build(self, lanes, device):
        return ToyWorlds(self, lanes, device)


class ToyWorlds:
    def __init__(self, config, lanes: Lanes, device):
        self._config, self._lanes, self._device = config, lanes, device
        self._share = lanes.per_lane(config.num_envs, "num_envs")
        places = range(lanes.local.start * self._share, lanes.local.stop * self._share)
        self.num_envs = len(places)
        self._streams = [RandomStream(lanes.seed, "toy", place) for place in places]
        self._task = torch.tensor([place % config.num_tasks for place in places])
        self.parts = tuple(SubtaskSpec(f"toy-{task}", task + 1, config.length) for task in range(config.num_tasks))
        self.action_space = Box(-1.0, 1.0, (config.num_tasks,), np.float32)
        space = Box(-np.inf, np.inf, (FEATURES,), np.float32)
        space = Box(0, 255, (3, 44, 44), np.uint8) if config.pixels else space
        several = Dict([("obs", space), ("task", Box(0, config.num_tasks - 1, (), np.int64))])
        self.observation_space = space if config.num_tasks == 1 else several
        self._at = torch.zeros(self.num_envs, FEATURES)
        self._taken = torch.zeros(self.num_envs, 2, dtype=torch.int64)  # total steps, and steps of the episode
        self.reset()

    def reset(self):
        self._at = torch.stack([stream.normal(0, FEATURES) for stream in self._streams])
        return self.observations()

    def observations(self):
        seen = self._at.clone()
        if self._config.pixels:
            pattern = torch.arange(3 * 44 * 44).view(3, 44, 44)
            seen = ((pattern + (64 * seen.sum(1)).long().view(-1, 1, 1, 1)) % 256).to(torch.uint8)
        return seen if self._config.num_tasks == 1 else {"obs": seen, "task": self._task}

    def step(self, action):
        self._taken += 1
        lucks = [s.uniform(int(n), 1 + FEATURES) for s, n in zip(self._streams, self._taken[:, 0], strict=True)]
        luck = torch.stack(lucks)
        self._at = 0.9 * self._at + 0.1 * action.sum(1, keepdim=True) + 0.1 * luck[:, 1:]
        final = self.observations()
        terminated = luck[:, 0] < self._config.ends
        truncated = ~terminated & (self._taken[:, 1] >= self._config.length)
        ended = terminated | truncated
        self._taken[ended, 1] = 0
        self._at = torch.where(ended[:, None], luck[:, 1:], self._at)
        return Step(self.observations(), -self._at[:, 0].abs(), terminated, truncated, final, {})

    def on_iteration_start(self, clock):
        pass

    def close(self):
        pass

    def shared_state(self):
        return {}

    def load_shared_state(self, state):
        pass

    def lane_state(self, lane):
        first = self._lanes.local.index(lane) * self._share
        rows = slice(first, first + self._share)
        return {"at": self._at[rows], "taken": self._taken[rows]}

    def load_lane_state(self, lane, state):
        for name, tensor in self.lane_state(lane).items():
            tensor.copy_(state[name])
