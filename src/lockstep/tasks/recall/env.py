"""Recall: a cue is shown once and must be named some steps later. Only a policy with recurrent state can solve it.

The cue of an episode is a pure function of the environment's key and the episode's number.

Shapes: E environments per lane, B local environments, K cues.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numba import njit
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.protocols import StateDict, Step
from lockstep.tasks.kernels import Buffers, random_below


@dataclass(frozen=True, kw_only=True)
class RecallConfig(VecEnv.Config):
    """Settings of Recall. Every number is for the whole run, not for one process."""

    delay: int = 8
    """Steps between the cue and the answer."""
    num_cues: int = 4
    """Number of different cues: a random answer is right with probability 1 / num_cues."""
    num_envs: int = 64
    """Number of environments in the whole run, stepped in parallel."""

    def __post_init__(self) -> None:
        if self.delay < 1 or not 2 <= self.num_cues <= 1000:
            raise ConfigError(
                f"delay is {self.delay} and num_cues is {self.num_cues}.",
                "Use a delay of 1 or more, and 2 to 1,000 cues.",
            )


@njit(cache=True, nogil=True)
def _write_obs(obs: Any, key: Any, episode: Any, age: Any, delay: int) -> None:
    """Write the observation of each environment: the cue in the first step, the last feature when it is asked for."""
    obs[:] = 0
    cues = obs.shape[1] - 1
    for b in range(len(key)):
        if age[b] == 0:
            obs[b, random_below(cues, key[b], episode[b], 0)] = 1
        elif age[b] == delay:
            obs[b, cues] = 1


@njit(cache=True, nogil=True)
def _step_all(action: Any, key: Any, episode: Any, age: Any, delay: int, cues: int, reward: Any, ended: Any) -> None:
    """Step every environment; the action taken `delay` steps after the cue is the answer."""
    for b in range(len(key)):
        ended[b] = age[b] == delay
        reward[b] = ended[b] and action[b] == random_below(cues, key[b], episode[b], 0)
        age[b] += 1
        if ended[b]:
            age[b] = 0
            episode[b] += 1


class Recall(VecEnv):
    """The environments of the local lanes. The reward is 1 for the right answer, and 0 otherwise."""

    Config = RecallConfig

    def setup(self) -> None:
        config, count = self.config, self.num_envs
        self._delay, self._cues = config.delay, config.num_cues
        self.observation_space = Box(0, 1, (config.num_cues + 1,), np.float32)
        self.action_space = Discrete(config.num_cues)
        self._buffers = Buffers(
            self.device,
            obs=(torch.float32, (count, config.num_cues + 1)),
            reward=(torch.float32, (count,)),
            terminated=(torch.bool, (count,)),
            truncated=(torch.bool, (count,)),  # never
            final_obs=(torch.float32, (count, config.num_cues + 1)),  # always zeros
        )
        self._key = np.array([stream.draw_seed(0) for stream in self.env_streams("recall")], np.int64)
        self._episode = self.register_state("episode", np.zeros(count, np.int64))
        self._age = self.register_state("age", np.zeros(count, np.int64))

    def reset(self) -> Tensor:
        self._episode[:] = self._age[:] = 0
        return self._upload_obs()

    def observations(self) -> Tensor:
        return self._buffers.tensors["obs"]

    def step(self, action: Tensor) -> Step:
        self.step_numpy(action.to("cpu", torch.int64).contiguous().numpy())
        self._upload_obs()
        out = self._buffers.tensors
        return Step(**out, episode_info={"right": out["reward"]}, any_truncated=False)

    def step_numpy(self, actions: np.ndarray) -> None:
        """Step the games alone, without tensors."""
        if actions.shape != (self.num_envs,):
            raise ValueError(f"actions have shape {actions.shape}, but there are {self.num_envs} environments")
        arrays = self._buffers.arrays
        state = (self._key, self._episode, self._age, self._delay)
        _step_all(actions, *state, self._cues, arrays["reward"], arrays["terminated"])

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        super().load_lane_state(lane, state)
        self._upload_obs()

    def is_valid_state(self, state: StateDict) -> bool:
        return bool(((state["age"] >= 0) & (state["age"] <= self._delay)).all())

    def _upload_obs(self) -> Tensor:
        _write_obs(self._buffers.arrays["obs"], self._key, self._episode, self._age, self._delay)
        return self._buffers.copy_to_device()["obs"]

    def render_text(self, env: int) -> str:
        obs, age = self._buffers.arrays["obs"][env], int(self._age[env])
        text = f"the cue is {int(obs.argmax())}" if age == 0 else "which was it?" if age == self._delay else "..."
        return f"step {age} of {self._delay}: {text}"

    def render(self, env: int) -> np.ndarray:
        """Draw the observation as a row of lamps."""
        lamps = (40 + 200 * self._buffers.arrays["obs"][env]).astype(np.uint8)
        image = np.pad(lamps.reshape(1, -1).repeat(32, axis=0).repeat(32, axis=1), 4)
        return np.stack([image, image, image // 2], axis=-1)
