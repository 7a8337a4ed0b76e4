"""DeepMind Control Suite: one task, or several tasks for one agent, restored bit for bit.

With several tasks, environment i always plays task i modulo their number. Observations are padded to the longest and
include the task's number. A task uses as many features of an action as it has actuators.

Shapes: E environments per lane, B local environments, D features of an observation, K of an action.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.protocols import StateDict, Step, SubtaskSpec
from lockstep.pytree import Tree, load_into
from lockstep.tasks.dm_control.suite import FRAMES, PIXELS, SimulatedTask, resolve
from lockstep.transfer import Uploader

DEFAULT_ENVS = 8
"""Environments of a run with one task: one for each lane."""


@dataclass(frozen=True, kw_only=True)
class DMControlConfig(VecEnv.Config):
    """Settings of Control Suite tasks. Every number but `threads` is for the whole run, not for one process."""

    tasks: tuple[str, ...] = ("walker-run",)
    """A task such as walker-run or cup-catch, several tasks for one agent, or the set mt30."""
    num_envs: int = DEFAULT_ENVS
    """Number of environments in the whole run, stepped in parallel. If several tasks cannot share 8 evenly: the
    smallest number that tasks and lanes share, such as 120 for the 30 tasks of mt30."""
    action_repeat: int = 2
    """Simulation steps per action. A sample is one action, so two simulation steps by default."""
    episode_length: int | None = None
    """Actions per episode. None: the suite's limit, 500 actions by default."""
    pixels: bool = False
    """Observe images, the last three frames of 64 x 64, instead of the state."""
    threads: int = 0
    """Threads per process that step environments; affects only speed, and helps large models on many cores."""

    def __post_init__(self) -> None:
        # `--task.tasks a,b` reaches the config as one name.
        object.__setattr__(self, "tasks", tuple(part for name in self.tasks for part in name.split(",")))
        if self.action_repeat < 1 or self.threads < 0 or (self.episode_length is not None and self.episode_length < 1):
            raise ConfigError(
                f"action_repeat is {self.action_repeat}, episode_length {self.episode_length}, threads {self.threads}.",
                "Use an action_repeat and episode_length of 1 or more, and 0 or more threads.",
            )

    @property
    def episode_steps(self) -> int:
        return self.episode_length or 1_000 // self.action_repeat

    @property
    def num_tasks(self) -> int:
        """Number of tasks that the environments share."""
        return len(resolve(self.tasks))

    def for_lanes(self, lanes: int) -> "DMControlConfig":
        """Return these settings with enough environments for the tasks, if their number was not set."""
        if self.num_envs != DEFAULT_ENVS or self.num_envs % self.num_tasks == 0:
            return self
        return replace(self, num_envs=math.lcm(self.num_tasks, lanes))


class DMControl(VecEnv):
    """The environments of the local lanes."""

    Config = DMControlConfig
    config: DMControlConfig
    prefers_image = True

    def setup(self) -> None:
        config, count = self.config, self.num_envs
        self._streams = self.env_streams("dmcontrol")
        names = resolve(config.tasks)
        self._task = torch.tensor([index % len(names) for index in self.env_indices])
        self._envs = [self._make_env(names[task]) for task in self._task.tolist()]
        # Every process needs the specification of every task, including tasks that it does not host.
        examples = {env.name: env for env in self._envs}
        examples |= {name: self._make_env(name) for name in names if name not in examples}
        envs = [examples[name] for name in names]
        self.parts = tuple(SubtaskSpec(env.name, env.actions, env.length) for env in envs)
        self._state_size = max(len(env.physics()) for env in envs)
        self.action_space = Box(-1.0, 1.0, (max(env.actions for env in envs),), np.float32)
        longest = max(len(env.begin(0)) for env in envs)
        space: Box = Box(-np.inf, np.inf, (longest,), np.float32)
        if config.pixels:
            space = Box(0, 255, (FRAMES * 3, PIXELS, PIXELS), np.uint8)
        self.observation_space = space
        if len(names) > 1:
            self.observation_space = Dict([("obs", space), ("task", Box(0, len(names) - 1, (), np.int64))])
        for env in envs:
            if not any(env is own for own in self._envs):
                env.close()

        self._obs = np.zeros((count, *space.shape), space.dtype)
        self._final_obs = np.zeros_like(self._obs)
        self._reward = np.zeros(count, np.float32)
        self._terminated, self._ended = np.zeros(count, bool), np.zeros(count, bool)
        self._episode = np.zeros(count, np.int64)
        self._total = np.zeros(count)
        """Return of the current episode so far."""
        self._returns = np.zeros(count)
        """Returns of the episodes that ended in the last step."""
        self._pool = ThreadPoolExecutor(config.threads) if config.threads and not config.pixels else None
        self._upload = Uploader(self.device)

    def _make_env(self, name: str) -> SimulatedTask:
        return SimulatedTask(name, self.config.action_repeat, self.config.episode_length, self.config.pixels)

    def reset(self) -> Tree:
        for row in range(self.num_envs):
            self._start_episode(row, episode=0)
        self._upload_outputs()
        return self.observations()

    def step(self, action: Tensor) -> Step:
        if len(action) != self.num_envs:
            raise ValueError(f"{len(action)} actions were given to {self.num_envs} environments")
        self.step_numpy(action.cpu().double().numpy())
        self._upload_outputs()
        return Step(**self._outputs, any_truncated=bool((self._ended & ~self._terminated).any()))

    def step_numpy(self, actions: np.ndarray) -> None:
        """Step the environments alone, without tensors."""
        step_env, rows = self._step_env, range(self.num_envs)
        for _ in map(step_env, rows, actions) if self._pool is None else self._pool.map(step_env, rows, actions):
            pass

    def observations(self) -> Tree:
        obs: Tree = self._outputs["obs"]
        return obs

    def _upload_outputs(self) -> None:
        """Copy the output of the last step to the device."""
        self._outputs: Any = self._upload(
            {
                "obs": self._obs_tree(self._obs),
                "reward": torch.from_numpy(self._reward),
                "terminated": torch.from_numpy(self._terminated),
                "truncated": torch.from_numpy(self._ended & ~self._terminated),
                "final_obs": self._obs_tree(self._final_obs),
                "episode_info": self._episode_info(),
            }
        )

    # Saved state

    def lane_state(self, lane: int) -> StateDict:
        """Return the state of E environments: episode, actions taken, physics, random generator, observation."""
        rows = self.lanes.lane_slice(lane, self.envs_per_lane)
        envs = self._envs[rows]
        physics = [env.physics() for env in envs]
        rng_states, cached_normals = zip(*(env.rng_state() for env in envs), strict=True)
        state = {
            "physics": np.stack([np.pad(state, (0, self._state_size - len(state))) for state in physics]),
            "chance": np.stack(rng_states),
            "number": np.array(cached_normals),
            "taken": np.array([env.taken for env in envs]),
            "episode": self._episode[rows],
            "total": self._total[rows],
            "obs": self._obs[rows],
        }
        return {name: torch.tensor(array) for name, array in state.items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        rows, owner = self.lanes.lane_slice(lane, self.envs_per_lane), f"{', '.join(self.config.tasks)}, lane {lane}"
        saved = self.lane_state(lane)
        load_into(saved, state, owner)  # checks names and shapes
        taken, episodes, rng_states = saved["taken"], saved["episode"], saved["chance"]
        lengths = torch.tensor([env.length for env in self._envs[rows]])
        valid = (taken >= 0) & (taken < lengths) & (episodes >= 0) & (episodes < 2**62)
        valid &= ((rng_states >= 0) & (rng_states < 2**32)).all(1)
        valid &= (rng_states[:, 624] <= 624) & (rng_states[:, 625] <= 1)
        if not valid.all() or not saved["physics"].isfinite().all():
            raise ValueError(
                f"{owner}: the saved state is invalid: a counter or value is out of range. Use another checkpoint."
            )
        for index, row in enumerate(range(self.num_envs)[rows]):
            self._episode[row] = int(episodes[index])
            env, obs = self._envs[row], saved["obs"][index].numpy()
            physics = saved["physics"][index, : len(env.physics())].numpy()
            cached_normal = float(saved["number"][index])
            env.restore(self._seed(row), int(taken[index]), physics, rng_states[index].numpy(), cached_normal, obs)
            self._obs[row], self._total[row] = obs, float(saved["total"][index])
        self._upload_outputs()

    # Rendering

    def render_text(self, env: int) -> str:
        if self.config.pixels:
            return ""
        return np.array2string(self._obs[env], precision=2, threshold=24, suppress_small=True)

    def render(self, env: int) -> np.ndarray:
        return self._envs[env].render(240, 320)

    def render_title(self, env: int) -> str:
        return str(self._envs[env].name)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for env in self._envs:
            env.close()

    # Helpers

    def _start_episode(self, row: int, episode: int) -> None:
        self._episode[row], self._total[row] = episode, 0.0
        self._write(self._obs, row, self._envs[row].begin(self._seed(row)))

    def _step_env(self, row: int, action: np.ndarray) -> None:
        env = self._envs[row]
        outcome = env.act(action[: env.actions])
        self._reward[row], self._terminated[row] = outcome.reward, outcome.terminated
        self._total[row] += outcome.reward
        self._ended[row] = outcome.ended
        if outcome.ended:
            self._write(self._final_obs, row, outcome.obs)
            self._returns[row] = self._total[row]
            self._start_episode(row, int(self._episode[row]) + 1)
        else:
            self._write(self._obs, row, outcome.obs)

    def _write(self, out: np.ndarray, row: int, obs: np.ndarray) -> None:
        out[row][tuple(map(slice, obs.shape))] = obs  # the padding beyond it stays zero

    def _seed(self, row: int) -> int:
        """Return the seed of an environment's current episode."""
        return self._streams[row].draw_seed(int(self._episode[row]), bits=32)

    def _episode_info(self) -> dict[str, Tensor]:
        """Return the returns of ended episodes by task if there are several tasks; NaN elsewhere."""
        if len(self.parts) == 1:
            return {}
        returns = torch.tensor(self._returns)
        return {
            f"return/{part.name}": torch.where(self._task == number, returns, torch.nan)
            for number, part in enumerate(self.parts)
        }

    def _obs_tree(self, obs: np.ndarray) -> Tree:
        tensor = torch.from_numpy(obs)
        return tensor if len(self.parts) == 1 else {"obs": tensor, "task": self._task}
