"""Gymnasium environments stepped in a loop. Their inputs and outputs are arrays that processes can share.

Shapes: B environments.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from lockstep.action_encoding import split_actions
from lockstep.config import ConfigError
from lockstep.tasks.gym.env_class import find_env
from lockstep.tasks.gym.obs_encoding import encode_obs
from lockstep.tasks.gym.packages import install_hint
from lockstep.tasks.gym.wrappers import wrap
from lockstep.tasks.rendering.image import frame_image
from lockstep.tasks.rendering.opengl import (
    MUJOCO_GL,
    convert_opengl_errors,
    headless_backend,
    prepare_opengl,
    prepare_sdl,
)

WRAPPERS = "lockstep.wrappers"
"""Name of an option of `make` that no environment has, because it is not an identifier."""


class SharedArrays(NamedTuple):
    """Arrays, or trees of arrays by name, with a row for each environment."""

    action: Any
    """[B, ...] The next action, in the form of `stored_space`."""
    seed: Any
    """[B] int64: seed of the next episode, which starts as soon as the current one ends."""
    obs: Any
    """[B, ...] The current observation, in the form of `encoded_space`."""
    reward: Any
    """[B] float32."""
    terminated: Any
    """[B] bool."""
    truncated: Any
    """[B] bool."""
    final_obs: Any
    """[B, ...] The last observation of the episodes that ended in the last step."""
    total: Any
    """[B] float64: return of the current episode so far, for rendering."""
    info: Any
    """[B] float32 by key of the last `info`, for episodes that ended in the last step; NaN: not a finite number."""


def ended_rows(table: SharedArrays) -> np.ndarray:
    """Return whether the episode of each environment ended in the last step, [B]."""
    ended: np.ndarray = table.terminated | table.truncated
    return ended


def make(id: str, options: Mapping[str, Any]) -> Any:
    """Make an environment by its id. The option WRAPPERS has the settings of `wrappers.wrap`."""
    env = gymnasium.make(find_env(id), **{name: value for name, value in options.items() if name != WRAPPERS})
    return wrap(env, id, options.get(WRAPPERS, {}))


class SyncEnvs:
    """Environments that are stepped one after another, one per row of the table."""

    shared_seed = False
    """Whether several environments are seeded together."""

    def __init__(self, id: str, options: Mapping[str, Any], table: SharedArrays) -> None:
        self._id, self.table = id, table
        self.envs = [make(id, options) for _ in table.seed]
        self._obs_space, self._act_space = self.envs[0].observation_space, self.envs[0].action_space

    @property
    def reseeded(self) -> np.ndarray:
        """Rows that were seeded again in the last step: those whose episode ended."""
        return ended_rows(self.table)

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Start an episode in some rows, each with its seed."""
        for row, seed in seeds.items():
            obs, _ = self.envs[row].reset(seed=seed)
            encode_obs(self._obs_space, obs, self.table.obs, row)
            self.table.total[row] = 0.0

    def step(self) -> None:
        """Take the actions in the table. An environment that ends starts its next episode at once."""
        table, total, ended = self.table, self.table.total, []
        for row, (env, action) in enumerate(zip(self.envs, split_actions(self._act_space, table.action), strict=True)):
            obs, table.reward[row], terminated, truncated, info = env.step(action)
            table.terminated[row], table.truncated[row] = terminated, truncated
            if terminated or truncated:
                ended.append(row)
                for key, values in table.info.items():
                    values[row] = to_number(info.get(key))
            encode_obs(self._obs_space, obs, table.final_obs if terminated or truncated else table.obs, row)
        total += table.reward
        self.begin({row: int(table.seed[row]) for row in ended})

    def replay(self, episodes: Mapping[int, np.ndarray]) -> set[int]:
        """Replay actions in rows at the start of an episode. Return the rows whose episode did not end early."""
        return {row for row, actions in episodes.items() if self._replay(row, actions)}

    def _replay(self, row: int, actions: np.ndarray) -> bool:
        for action in split_actions(self._act_space, actions):
            obs, reward, terminated, truncated, _ = self.envs[row].step(action)
            encode_obs(self._obs_space, obs, self.table.obs, row)
            self.table.total[row] += np.float32(reward)
            if terminated or truncated:
                return False
        return True

    def render_text(self, row: int) -> str:
        """Render an environment as text, if it supports it."""
        # The mode is fixed when the environment is made, but environments that render text read it only here.
        env = self.envs[row].unwrapped
        render_mode, env.render_mode = env.render_mode, "ansi"
        try:
            return str(env.render())
        finally:
            env.render_mode = render_mode

    def render(self, row: int) -> np.ndarray:
        """Render an environment as an image, uint8 [height, width, 3], if it supports it."""
        prepare_opengl()
        prepare_sdl()
        # Gymnasium's own choice needs a display. Looking for libraries starts a process: not in every frame.
        uses_mujoco = hasattr(self.envs[row].unwrapped, "mujoco_renderer")
        if uses_mujoco and MUJOCO_GL not in os.environ and (backend := headless_backend()) != "disabled":
            os.environ[MUJOCO_GL] = backend
        try:
            with convert_opengl_errors(self._id):
                return frame_image(self.envs[row].render())
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"{self._id} needs a package to render images.", install_hint(error, self._id)) from error

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self.envs.clear()  # ale_py prints a list of leaks if an environment still exists when Python exits


def to_number(value: Any) -> float:
    """Return a bool or number of an `info` as a float; NaN for anything else, and for infinity."""
    if not isinstance(value, bool | int | float | np.generic | np.ndarray):
        return math.nan
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        return math.nan
    number = float(array.item())
    return number if math.isfinite(number) else math.nan


def copy_row(source: Any, target: Any, row: int) -> None:
    """Copy one row of a tree of arrays."""
    if isinstance(source, dict):
        for name, part in source.items():
            copy_row(part, target[name], row)
    else:
        target[row] = source[row]
