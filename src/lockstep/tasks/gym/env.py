"""Gymnasium environments, single or vectorized, and restored by replaying their actions.

Every episode has its own seed, derived from the run's seed, the environment's global index and the episode's number. An
environment whose state cannot be read is therefore saved as its episode's number and the actions taken in it. Vector
environments may be seeded less often (`vector_plan.py`). What is said of an episode here is then true of the time since
the last seed.

Shapes: E environments per lane, B local environments.
"""

import difflib
import math
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from torch import Tensor

from lockstep.action_encoding import stored_space
from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.protocols import Split, StateDict, Step, SubtaskSpec
from lockstep.pytree import Tree, load_into, named_leaves, tree_map
from lockstep.tasks.gym.env_class import class_id
from lockstep.tasks.gym.env_file import env_file, with_absolute_path
from lockstep.tasks.gym.packages import install_hint
from lockstep.tasks.gym.sync_envs import WRAPPERS, SharedArrays, SyncEnvs, make
from lockstep.tasks.gym.vector_envs import VectorEnvs
from lockstep.tasks.gym.vector_maker import VectorizationMode, evaluation_kwargs, find_vector_maker
from lockstep.tasks.gym.vector_plan import make_plan
from lockstep.tasks.gym.worker_pool import WorkerPool
from lockstep.tasks.gym.wrappers import has_action_mask, removed_parts, text_parts, wrap
from lockstep.tasks.obs_encoding import encoded_space
from lockstep.tasks.rendering.opengl import convert_opengl_errors
from lockstep.tasks.spaces import actions_valid, allocate, env_actions, policy_space
from lockstep.transfer import Uploader

VELOCITIES = {
    "Acrobot": (4, 5),
    "CartPole": (1, 3),
    "LunarLander": (2, 3, 5),
    "LunarLanderContinuous": (2, 3, 5),
    "MountainCar": (1,),
    "MountainCarContinuous": (1,),
    "Pendulum": (2,),
}
"""Indices of the velocities in an observation."""
RESERVED = frozenset(("reward", "rewards", "return", "length", "terminated", "truncated"))
"""Names of other results of a step or an episode."""


@dataclass(frozen=True, kw_only=True)
class GymConfig(VecEnv.Config):
    """Settings of a Gymnasium task. Every number but `num_workers` is for the whole run, not for one process."""

    id: str = "CartPole-v1"
    """Id of the environment. `package:Name-v0` imports the package that registers it, and `my_env.py:Name-v0` loads a
    file. `package:Class` and `my_env.py:Class` name a class. From Python, it may be the class itself."""
    num_envs: int = 8
    """Number of environments in the whole run, stepped in parallel."""
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Keyword arguments for `gymnasium.make`, or for the vector entry point."""
    vectorization_mode: VectorizationMode = "auto"
    """How environments are stepped. sync: one after another. vector_entry_point: by the vector environment that is
    registered with the id, one instance per lane. auto: by the vector environment, if it can step the environments of
    a lane together and takes all env_kwargs (Atari); else one after another."""
    mask_velocity: bool = False
    """Replace velocities by zero, so that a policy needs recurrent state (classic control and LunarLander)."""
    frame_stack: int = 1
    """Number of latest observations that are joined to one: images by their channels, vectors one after another."""
    float_obs: bool = False
    """Whether observations of uint8 are symbols, as in MiniGrid, and not images: they become float32, so that
    --algo.normalize-obs normalizes them."""
    use_action_mask: bool = True
    """Whether to choose only actions that the environment's action mask allows: `info["action_mask"]`, or the part
    `action_mask` of a dict observation. False: ignore the mask, and remove it from observations."""
    info_keys: tuple[str, ...] = ("is_success",)
    """Keys of the last `info` of an episode whose numbers and booleans are averaged over episodes and logged, as
    `rollout/ep_KEY_mean` and `eval/KEY_mean`. A key that no episode reports is not logged."""
    max_replay_steps: int = 20_000
    """Longest episode, in steps, whose actions are kept to restore it. A longer one is restarted on resume."""
    num_workers: int = 0
    """Worker processes per process; affects only speed, and helps if a step is slow (1 ms). 0: step in the process."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = ("info_keys", "num_workers")

    def __post_init__(self) -> None:
        if isinstance(self.id, type):
            object.__setattr__(self, "id", class_id(self.id))
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is {self.num_workers}.", "Use 0 or more.")
        if not 1 <= self.frame_stack <= 64:
            raise ConfigError(f"frame_stack is {self.frame_stack}.", "Use 1 to 64 frames.")
        if taken := sorted({*self.info_keys} & RESERVED):
            raise ConfigError(
                f"task.info_keys contains {', '.join(taken)}, which Lockstep measures itself.",
                "Rename the key in a wrapper of the environment.",
            )

    def with_split(self, split: Split) -> "GymConfig":
        """Return settings for training, or for evaluation: Atari games without reward clipping and to their end."""
        if split == "train":
            return self
        with _convert_errors(self.id):
            changed = evaluation_kwargs(self.id, self.vectorization_mode, self.env_kwargs)
        return replace(self, env_kwargs={**self.env_kwargs, **changed})

    @property
    def code_file(self) -> Path | None:
        """Python file of the user that this task executes."""
        return env_file(self.id)

    def with_absolute_paths(self) -> "GymConfig":
        """Resolve a file that the user named, against the working directory."""
        return replace(self, id=with_absolute_path(self.id))


class GymEnvs(VecEnv):
    """The environments of the local lanes. `tasks/spaces.py` describes the form of observations and actions."""

    Config = GymConfig
    config: GymConfig

    def setup(self) -> None:
        config, count = self.config, self.num_envs
        wrapped = {"mask-velocity": config.mask_velocity, "frame-stack": config.frame_stack > 1}
        wrapped["float-obs"] = config.float_obs
        single = next((f"--task.{name}" for name, is_set in wrapped.items() if is_set), "")
        with _convert_errors(config.id):
            maker = find_vector_maker(
                config.id, config.vectorization_mode, config.env_kwargs, single, config.num_workers
            )
            probed = _probe(config) if maker is None else maker.describe()
        options, self._modes, self._obs_space, self._action_space, self.max_episode_steps = probed
        self.observation_space, self.action_space = encoded_space(self._obs_space), policy_space(self._action_space)
        if self.max_episode_steps and isinstance(self._action_space, Box):
            # Algorithms derive the discount from the length of episodes.
            self.parts = (SubtaskSpec(config.id, math.prod(self._action_space.shape), self.max_episode_steps),)
        self.prefers_image = "rgb_array" in self._modes and "ansi" not in self._modes

        self._stored_actions = stored_space(self._action_space)
        self._streams = self.env_streams("gym")
        self._episode = np.zeros(count, np.int64)
        self._steps = np.zeros(count, np.int64)
        self._log = ActionLog(self._stored_actions, count, config.max_replay_steps)
        self._restarted = 0

        table = SharedArrays(
            action=allocate(self._stored_actions, count),
            seed=np.zeros(count, np.int64),
            obs=allocate(self.observation_space, count),
            reward=np.zeros(count, np.float32),
            terminated=np.zeros(count, bool),
            truncated=np.zeros(count, bool),
            final_obs=allocate(self.observation_space, count),
            total=np.zeros(count, np.float64),
            info={key: np.full(count, np.nan, np.float32) for key in dict.fromkeys(config.info_keys)},
        )
        workers = min(config.num_workers, count) if count > 1 else 0  # one environment cannot be parallelized
        self._envs: SyncEnvs | WorkerPool | VectorEnvs
        with _convert_errors(config.id):
            if maker is not None:
                plan = make_plan(maker, self.envs_per_lane, config.max_replay_steps)
                self._envs = VectorEnvs(maker, plan, table)
            elif workers:
                self._envs = WorkerPool(config.id, options, table, workers, self.env_indices)
            else:
                self._envs = SyncEnvs(config.id, options, table)
        self._table = self._envs.table
        returned = {name: getattr(self._table, name) for name in Step._fields if name in SharedArrays._fields}
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


def _probe(config: GymConfig) -> tuple[dict[str, Any], list[str], Space[Any], Space[Any], int | None]:
    """Return the options of `make`, the render modes, the observation and action spaces, and the step limit."""
    wrappers: dict[str, Any] = {"frame_stack": config.frame_stack, "float_obs": config.float_obs}
    options: dict[str, Any] = {"disable_env_checker": True, **config.env_kwargs}
    if config.mask_velocity:
        name = config.id.rpartition("-v")[0]
        if name not in VELOCITIES:
            raise ConfigError(
                f"the velocities in the observations of {config.id} are not known.",
                f"Remove --task.mask-velocity, or use one of {', '.join(VELOCITIES)}.",
            )
        wrappers["hidden"] = list(VELOCITIES[name])
    probe = make(config.id, options)
    wrappers["action_mask"] = config.use_action_mask and has_action_mask(probe)
    wrappers["removed"] = removed_parts(probe.observation_space, config.use_action_mask)
    if text := text_parts(probe.observation_space):
        warnings.warn(f"{config.id}: the policy does not see the text in {', '.join(text)}.", stacklevel=2)
    probe.close()
    probe = wrap(probe, config.id, wrappers)
    modes = probe.metadata.get("render_modes") or []
    render_mode = next((mode for mode in ("rgb_array", "ansi") if mode in modes), None)
    if render_mode:
        options = {"render_mode": render_mode, **options}  # costs nothing until a frame is rendered
    limit = probe.spec.max_episode_steps if probe.spec else None
    return options | {WRAPPERS: wrappers}, modes, probe.observation_space, probe.action_space, limit


@contextmanager
def _convert_errors(id: str) -> Iterator[None]:
    """Convert errors of Gymnasium when it makes an environment to a ConfigError with a fix."""
    try:
        with convert_opengl_errors(id):  # MuJoCo loads OpenGL when it is imported, if MUJOCO_GL is set
            yield
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ConfigError(f"{id} needs a package that is not installed.", install_hint(error, id)) from error
    except TypeError as error:
        raise ConfigError(f"{id} cannot be made: {error}.", "Fix --task.env-kwargs.") from error
    except gymnasium.error.Error as error:
        if (file := env_file(id)) is not None:
            name = id.rpartition(":")[2]
            fix = f"Add to the file: gymnasium.register({name!r}, entry_point=CLASS)"
            raise ConfigError(f"{file} does not register {name}: {error}", fix) from error
        close = difflib.get_close_matches(id, gymnasium.registry, n=2)
        hint = "Prefix the id of another package's environment with its module, as in my_package:Name-v0."
        if close:
            hint = f"Did you mean {' or '.join(close)}?"
        raise ConfigError(f"{id} is not a registered environment.", hint) from error
