"""Environments whose state cannot be read: restored by replaying their actions.

Every episode has its own seed, derived from the run's seed, the environment's global index and the episode's number. An
environment is therefore saved as its episode's number and the actions taken in it. Some environments are seeded less
often. What is said of an episode here is then true of the time since the last seed.

Shapes: E environments per lane, B local environments.
"""

import warnings
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from lockstep.action_encoding import stored_space
from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.protocols import StateDict, Step
from lockstep.pytree import Tree, load_into, named_leaves, tree_map
from lockstep.tasks.gym.spaces import actions_valid, allocate, env_actions
from lockstep.transfer import Uploader


class ReplayedEnvs(VecEnv):
    """Base class of tasks that step environments of other packages on the host.

    `setup` of a subclass calls `prepare_replay` and `allocate_table`, and passes an object with the methods of
    `SyncEnvs` to `connect`. Settings need the fields `id` and `max_replay_steps`.
    """

    def prepare_replay(self, actions: Space[Any], stream: str) -> None:
        """Allocate the log of actions of an action space. `stream` is the name of the random streams of seeds."""
        self._action_space, self._stored_actions = actions, stored_space(actions)
        self._streams = self.env_streams(stream)
        self._episode = np.zeros(self.num_envs, np.int64)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._log = ActionLog(self._stored_actions, self.num_envs, self.config.max_replay_steps)
        self._restarted = 0

    def allocate_table(self, kind: Any, metrics: Iterable[str], **more: np.ndarray) -> Any:
        """Allocate a table of arrays: `SharedArrays`, or a named tuple with its fields and `more`."""
        count = self.num_envs
        return kind(
            action=allocate(self._stored_actions, count),
            seed=np.zeros(count, np.int64),
            obs=allocate(self.observation_space, count),
            reward=np.zeros(count, np.float32),
            terminated=np.zeros(count, bool),
            truncated=np.zeros(count, bool),
            final_obs=allocate(self.observation_space, count),
            total=np.zeros(count, np.float64),
            info={name: np.full(count, np.nan, np.float32) for name in dict.fromkeys(metrics)},
            **more,
        )

    def connect(self, envs: Any, render_modes: list[str]) -> None:
        """Use environments, which read actions from a table and write results to it."""
        self._envs, self._table, self._modes = envs, envs.table, render_modes
        self.prefers_image = "rgb_array" in render_modes and "ansi" not in render_modes
        returned = {name: getattr(self._table, name) for name in Step._fields if name in self._table._fields}
        self._host: Any = tree_map(torch.from_numpy, returned | {"episode_info": self._table.info})  # shares memory
        self._upload = Uploader(self.device)

    def reset(self) -> Tree:
        for row in range(self.num_envs):
            self._start_episode(row, episode=0)
        self._envs.begin({row: self._seed(row) for row in range(self.num_envs)})
        self._on_device = self._upload(self._host)
        return self.observations()

    def step(self, action: Tensor) -> Step:
        self._warn_about_restarts()
        if len(action) != self.num_envs:
            raise ValueError(f"{len(action)} actions were given to {self.num_envs} environments")
        actions = env_actions(self._action_space, action.cpu().numpy())
        self._log.append(actions, longest=int(self._steps.max()) + 1)
        table = self._table
        table.action[:] = actions
        self._envs.step()
        self._steps += 1
        for row in np.flatnonzero(self._envs.reseeded).tolist():
            self._start_episode(row, self._episode[row] + 1)
        self._on_device = self._upload(self._host)
        return Step(**self._on_device, any_truncated=bool(table.truncated.any()))

    def step_numpy(self, actions: np.ndarray) -> None:
        """Step the environments alone, without tensors."""
        self._table.action[:] = env_actions(self._action_space, actions)
        self._envs.step()

    def observations(self) -> Tree:
        """Return the current observations [B, ...], after the last reset, step or restore."""
        self._warn_about_restarts()
        obs: Tree = self._on_device["obs"]
        return obs

    # Saved state

    def lane_state(self, lane: int) -> StateDict:
        """Return episodes, steps and observations of E environments, and their actions, concatenated."""
        rows = self.lanes.lane_slice(lane, self.envs_per_lane)
        steps = self._steps[rows]
        # An episode beyond the limit is saved without its actions, so that the restore starts another one.
        logged = np.where(steps <= self.config.max_replay_steps, steps, 0)
        actions = [self._log.last(row, count) for row, count in zip(range(self.num_envs)[rows], logged, strict=True)]
        return {
            "episode": torch.tensor(self._episode[rows]),
            "steps": torch.tensor(steps),
            "logged": torch.tensor(logged),
            "actions": torch.from_numpy(np.concatenate(actions)),
        } | {name: obs[rows].clone() for name, obs in named_leaves(self._host["obs"], "obs").items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        """Replay every episode. If a replay does not end at the saved observation, start the next episode."""
        owner, saved = f"{self.config.id}, lane {lane}", self.lane_state(lane)
        saved_actions = state.get("actions", saved["actions"])
        if saved_actions.dim() == 0 or len(saved_actions) > self.envs_per_lane * self.config.max_replay_steps:
            raise ValueError(
                f"{owner}: the saved actions are more than the {self.config.max_replay_steps:,} of an episode."
            )
        saved["actions"] = saved_actions.clone()
        load_into(saved, state, owner)  # checks names and shapes
        episodes, steps, logged = (saved[name].tolist() for name in ("episode", "steps", "logged"))
        if min(episodes + steps + logged) < 0 or sum(logged) != len(saved["actions"]) or max(episodes) >= 2**62:
            raise ValueError(f"{owner}: the saved episodes and their actions do not match. Use another checkpoint.")
        if not actions_valid(self._stored_actions, saved["actions"].numpy()):
            raise ValueError(f"{owner}: the saved actions are not in {self._action_space}. Use another checkpoint.")
        actions = saved["actions"].split(logged)
        rows = range(self.num_envs)[self.lanes.lane_slice(lane, self.envs_per_lane)]
        for row, episode in zip(rows, episodes, strict=True):
            self._start_episode(row, episode)
        self._envs.begin({row: self._seed(row) for row in rows})
        replayable = [index for index in range(self.envs_per_lane) if steps[index] == logged[index]]
        replayed = self._envs.replay({rows[index]: actions[index].numpy() for index in replayable})
        lost, current = [], named_leaves(self._host["obs"], "obs")
        for index, row in enumerate(rows):
            # Compare the observations bit for bit: a NaN equals itself.
            same = all(x[row].numpy().tobytes() == saved[name][index].numpy().tobytes() for name, x in current.items())
            if row in replayed and same:
                self._log.put(row, actions[index].numpy())
                self._steps[row] = steps[index]
            else:
                lost.append(row)
        if lost and self._envs.shared_seed:
            lost = [*rows]
        for row in lost:
            self._start_episode(row, self._episode[row] + 1)
        self._envs.begin({row: self._seed(row) for row in lost})
        self._restarted += len(lost)
        self._on_device = self._upload(self._host)

    # Rendering

    def render_text(self, env: int) -> str:
        if "ansi" in self._modes:
            return self._envs.render_text(env)
        return "  ".join(
            f"{name} {np.array2string(obs[env].numpy(), precision=3, threshold=12)}"
            for name, obs in named_leaves(self._host["obs"], "obs").items()
        )

    def render(self, env: int) -> np.ndarray:
        if "rgb_array" not in self._modes:
            raise ConfigError(f"{self.config.id} cannot render images.", "Render it as text.")
        return self._envs.render(env)

    def render_title(self, env: int) -> str:
        return str(self.config.id)

    def close(self) -> None:
        self._envs.close()

    # Helpers

    def _start_episode(self, row: int, episode: int) -> None:
        """Record that an environment is at the start of an episode, and prepare the seed of the next episode."""
        self._episode[row], self._steps[row] = episode, 0
        self._table.seed[row] = self._seed(row, ahead=1)

    def _seed(self, row: int, ahead: int = 0) -> int:
        """Return the seed of an environment's current episode, or of a later one."""
        return self._streams[row].draw_seed(self._episode[row] + ahead, bits=31)

    def _warn_about_restarts(self) -> None:
        """Warn once per restore, although lanes are restored one by one."""
        restarted, self._restarted = self._restarted, 0
        if restarted:
            warnings.warn(
                f"{self.config.id}: {restarted} of the {self.num_envs} environments of this process could not be "
                "restored, because replaying their actions gave another observation or because their episode is longer "
                f"than max_replay_steps ({self.config.max_replay_steps}). They start their next episode instead. "
                "Training continues correctly, but not exactly as the uninterrupted run would have.",
                stacklevel=3,
            )


class ActionLog:
    """The latest actions of all environments, back to the start of the longest current episode."""

    def __init__(self, space: Space[Any], count: int, max_steps: int) -> None:
        self._zeros = allocate(space, count)  # [B, ...]
        self._max_steps = max_steps
        self._steps: deque[np.ndarray] = deque()

    def append(self, actions: np.ndarray, longest: int) -> None:
        """Add one step, and drop steps older than the `longest` episode or `max_steps`."""
        self._steps.append(actions.copy())  # an environment may scale its action in place
        while len(self._steps) > min(longest, self._max_steps):
            self._steps.popleft()

    def last(self, row: int, count: int) -> np.ndarray:
        """Return the last `count` actions of an environment, [count, ...]."""
        newest = islice(self._steps, len(self._steps) - count, None)
        actions = [step[row] for step in newest]
        return np.array(actions, self._zeros.dtype).reshape(count, *self._zeros.shape[1:])

    def put(self, row: int, actions: np.ndarray) -> None:
        """Set the last actions of an environment."""
        while len(self._steps) < len(actions):
            self._steps.appendleft(self._zeros.copy())
        for step, action in zip(reversed(self._steps), reversed(actions), strict=False):
            step[row] = action
