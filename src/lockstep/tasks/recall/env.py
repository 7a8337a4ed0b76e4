"""Recall: a cue is shown once, and must be named some steps later. Only a policy with memory can.

An episode's cue is a pure function of its environment's key and its number.

Shapes: E environments a lane, B local environments, K cues.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from numba import njit
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step
from lockstep.pytree import load_into
from lockstep.rng import RandomStream
from lockstep.tasks.kernels import Buffers, random_below


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """Settings of Recall. Every number is for the whole run, not for one process."""

    delay: int = 8
    """Steps between the cue and the answer."""
    num_cues: int = 4
    """How many different cues there are: by chance, one answer in so many is right."""
    num_envs: int = 64
    """Environments played side by side."""

    def __post_init__(self) -> None:
        if self.delay < 1 or not 2 <= self.num_cues <= 1000:
            raise ConfigError(
                f"delay is {self.delay} and num_cues is {self.num_cues}.", "Use 1 or more, and 2 to 1,000."
            )

    def build(self, lanes: Lanes, device: torch.device) -> "Recall":
        return Recall(self, lanes, device)


@njit(cache=True, nogil=True)
def _show(obs: Any, key: Any, episode: Any, age: Any, delay: int) -> None:
    """Write the observation of each environment: the cue at first, the last feature when it is asked for."""
    obs[:] = 0
    cues = obs.shape[1] - 1
    for b in range(len(key)):
        if age[b] == 0:
            obs[b, random_below(cues, key[b], episode[b], 0)] = 1
        elif age[b] == delay:
            obs[b, cues] = 1


@njit(cache=True, nogil=True)
def _answer(action: Any, key: Any, episode: Any, age: Any, delay: int, cues: int, reward: Any, ended: Any) -> None:
    """Take one step everywhere; the answer is judged `delay` steps after the cue."""
    for b in range(len(key)):
        ended[b] = age[b] == delay
        reward[b] = ended[b] and action[b] == random_below(cues, key[b], episode[b], 0)
        age[b] += 1
        if ended[b]:
            age[b] = 0
            episode[b] += 1


class Recall:
    """The environments of the local lanes. The reward is 1 for the right answer, and 0 else."""

    def __init__(self, config: RecallConfig, lanes: Lanes, device: torch.device) -> None:
        self._lanes, self._share = lanes, lanes.per_lane(config.num_envs, "num_envs")
        self.num_envs = count = len(lanes) * self._share
        self._delay, self._cues = config.delay, config.num_cues
        self.observation_space: Space[Any] = Box(0, 1, (config.num_cues + 1,), np.float32)
        self.action_space: Space[Any] = Discrete(config.num_cues)
        self._buffers = Buffers(
            device,
            obs=(torch.float32, (count, config.num_cues + 1)),
            reward=(torch.float32, (count,)),
            terminated=(torch.bool, (count,)),
            truncated=(torch.bool, (count,)),  # never
            final_obs=(torch.float32, (count, config.num_cues + 1)),  # there is nothing left to see
        )
        places = [lane * self._share + env for lane in lanes.local for env in range(self._share)]
        self._key = np.array([RandomStream(lanes.seed, "recall", place).draw_seed(0) for place in places], np.int64)
        self._episode, self._age = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.reset()

    def reset(self) -> Tensor:
        self._episode[:] = self._age[:] = 0
        return self._shown()

    def observations(self) -> Tensor:
        return self._buffers.tensors["obs"]

    def step(self, action: Tensor) -> Step:
        self.step_numpy(action.to("cpu", torch.int64).contiguous().numpy())
        self._shown()
        out = self._buffers.tensors
        return Step(**out, episode_info={"right": out["reward"]}, any_truncated=False)

    def step_numpy(self, actions: np.ndarray) -> None:
        """The game alone, with nothing around it."""
        if actions.shape != (self.num_envs,):
            raise ValueError(f"actions of shape {actions.shape} were given to {self.num_envs} environments")
        arrays = self._buffers.arrays
        state = (self._key, self._episode, self._age, self._delay)
        _answer(actions, *state, self._cues, arrays["reward"], arrays["terminated"])

    def on_iteration_start(self, clock: TrainState) -> None:
        """The game is the same throughout the run."""

    def close(self) -> None:
        """There is nothing to close."""

    def shared_state(self) -> StateDict:
        return {}

    def load_shared_state(self, state: StateDict) -> None:
        load_into({}, state, "Recall")

    def lane_state(self, lane: int) -> StateDict:
        return {name: tensor.clone() for name, tensor in self._live(lane).items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        age = state.get("age")
        if age is not None and not ((age >= 0) & (age <= self._delay)).all():
            raise ValueError(f"Recall, lane {lane}: the saved steps are none of an episode of {self._delay + 1}.")
        load_into(self._live(lane), state, f"Recall, lane {lane}")
        self._shown()

    def _live(self, lane: int) -> StateDict:
        rows = self._lanes.lane_slice(lane, self._share)
        return {"episode": torch.from_numpy(self._episode[rows]), "age": torch.from_numpy(self._age[rows])}

    def _shown(self) -> Tensor:
        _show(self._buffers.arrays["obs"], self._key, self._episode, self._age, self._delay)
        return self._buffers.copy_to_device()["obs"]

    def render_text(self, env: int) -> str:
        obs, age = self._buffers.arrays["obs"][env], int(self._age[env])
        seen = f"the cue is {int(obs.argmax())}" if age == 0 else "which was it?" if age == self._delay else "..."
        return f"step {age} of {self._delay}: {seen}"

    def render(self, env: int) -> np.ndarray:
        """The observation as a row of lamps."""
        lamps = (40 + 200 * self._buffers.arrays["obs"][env]).astype(np.uint8)
        picture = np.pad(lamps.reshape(1, -1).repeat(32, axis=0).repeat(32, axis=1), 4)
        return np.stack([picture, picture, picture // 2], axis=-1)
