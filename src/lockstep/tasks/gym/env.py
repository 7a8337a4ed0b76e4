"""Gymnasium environments, single or vectorized, and restored by replaying their actions (`replayed_envs.py`).

Vector environments may be seeded less often than once per episode (`vector_plan.py`).
"""

import difflib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium import Space
from gymnasium.spaces import Box

from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.protocols import Split, SubtaskSpec
from lockstep.tasks.gym.env_class import class_id
from lockstep.tasks.gym.env_file import env_file, with_absolute_path
from lockstep.tasks.gym.obs_encoding import encoded_space
from lockstep.tasks.gym.packages import install_hint
from lockstep.tasks.gym.replayed_envs import ReplayedEnvs
from lockstep.tasks.gym.spaces import policy_space
from lockstep.tasks.gym.sync_envs import WRAPPERS, SharedArrays, SyncEnvs, make
from lockstep.tasks.gym.vector_envs import VectorEnvs
from lockstep.tasks.gym.vector_maker import VectorizationMode, evaluation_kwargs, find_vector_maker
from lockstep.tasks.gym.vector_plan import make_plan
from lockstep.tasks.gym.worker_pool import WorkerPool
from lockstep.tasks.gym.wrappers import has_action_mask, removed_parts, text_parts, wrap
from lockstep.tasks.rendering.opengl import convert_opengl_errors

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


class GymEnvs(ReplayedEnvs):
    """The environments of the local lanes. `tasks/gym/spaces.py` describes the form of observations and actions."""

    Config = GymConfig
    config: GymConfig

    def setup(self) -> None:
        config, count = self.config, self.num_envs
        wrapped = {
            "mask-velocity": config.mask_velocity,
            "frame-stack": config.frame_stack > 1,
            "float-obs": config.float_obs,
            "use-action-mask": not config.use_action_mask,
        }
        single = next((f"--task.{name}" for name, is_set in wrapped.items() if is_set), "")
        with _convert_errors(config.id):
            maker = find_vector_maker(
                config.id, config.vectorization_mode, config.env_kwargs, single, config.num_workers
            )
            probed = _probe(config) if maker is None else maker.describe()
        options, modes, obs_space, actions, self.max_episode_steps = probed
        self.observation_space, self.action_space = encoded_space(obs_space), policy_space(actions)
        if self.max_episode_steps and isinstance(actions, Box):
            # Algorithms derive the discount from the length of episodes.
            self.parts = (SubtaskSpec(config.id, math.prod(actions.shape), self.max_episode_steps),)
        self.prepare_replay(actions, "gym")
        table: SharedArrays = self.allocate_table(SharedArrays, config.info_keys)
        workers = min(config.num_workers, count) if count > 1 else 0  # one environment cannot be parallelized
        envs: SyncEnvs | WorkerPool | VectorEnvs
        with _convert_errors(config.id):
            if maker is not None:
                plan = make_plan(maker, self.envs_per_lane, config.max_replay_steps)
                envs = VectorEnvs(maker, plan, table)
            elif workers:
                envs = WorkerPool(config.id, options, table, workers, self.env_indices)
            else:
                envs = SyncEnvs(config.id, options, table)
        self.connect(envs, modes)


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
