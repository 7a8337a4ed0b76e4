"""Gymnasium: any registered environment, in a plain loop or in worker processes, restored by replaying its actions.

Every episode has a seed of its own, made from the run's seed, the environment's global index and the episode's number.
So an environment that cannot hand out its state is saved as its episode's number and the actions taken in it.

Shapes: E environments a lane, B local environments.
"""

import difflib
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step
from lockstep.pytree import Tree, load_into, named_leaves, tree_map
from lockstep.rng import RandomStream
from lockstep.tasks.gym.sync_envs import SharedArrays, SyncEnvs, make
from lockstep.tasks.gym.worker_pool import WorkerPool
from lockstep.tasks.obs_encoding import encoded_space
from lockstep.tasks.spaces import actions_valid, allocate, env_actions, policy_space, tensor_dtype
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
"""Which features of an observation are velocities."""


@dataclass(frozen=True, kw_only=True)
class GymConfig:
    """Settings of a Gymnasium task. Every number but `workers` is for the whole run, not for one process."""

    id: str = "CartPole-v1"
    """Id of the environment; `package:Name-v0` imports the package that registers it."""
    num_envs: int = 8
    """Environments played side by side."""
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the environment, as `gymnasium.make` takes them."""
    mask_velocity: bool = False
    """Show velocities as zero, so that only a policy with memory can know them (classic control and LunarLander)."""
    max_replay_steps: int = 20_000
    """Longest episode, in steps, whose actions are kept to restore it; a longer one starts anew on resume."""
    num_workers: int = 0
    """Worker processes that step the environments of each process, for speed alone; pays if steps are slow (1 ms)."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(
                f"num_workers is {self.num_workers}, and there cannot be fewer than none.", "Use 0 or more."
            )

    def build(self, lanes: Lanes, device: torch.device) -> "GymEnvs":
        return GymEnvs(self, lanes, device)


class GymEnvs:
    """The environments of the local lanes. Observations and actions have the form that `tasks/spaces.py` describes."""

    def __init__(self, config: GymConfig, lanes: Lanes, device: torch.device) -> None:
        self._config, self._lanes = config, lanes
        self._share = lanes.per_lane(config.num_envs, "num_envs")
        self.num_envs = count = len(lanes) * self._share
        with _explained(config.id):
            options, self._modes, self._obs_space, self._act_space = _survey(config)
        self.observation_space, self.action_space = encoded_space(self._obs_space), policy_space(self._act_space)

        # Keyed by the place in the whole run, so that it does not matter who hosts an environment.
        places = range(lanes.local.start * self._share, lanes.local.stop * self._share)
        self._streams = [RandomStream(lanes.seed, "gym", place) for place in places]
        self._episode = np.zeros(count, np.int64)
        self._steps = np.zeros(count, np.int64)
        self._log = ActionLog(self._act_space, count, config.max_replay_steps)
        self._restarted = 0

        workers = min(config.num_workers, count) if count > 1 else 0  # one alone has nobody to be stepped beside
        own = _table(self.observation_space, self._act_space, count)
        with _explained(config.id):
            self._envs = (
                WorkerPool(config.id, options, own, workers, places) if workers else SyncEnvs(config.id, options, own)
            )
        self._table = self._envs.table
        returned = {name: getattr(self._table, name) for name in Step._fields if name in SharedArrays._fields}
        self._host: Any = tree_map(torch.from_numpy, returned)  # the same memory
        self._upload = Uploader(device)
        self._on_device: Any = None
        """The same on the device; None while it is out of date."""

    def reset(self) -> Tree:
        for row in range(self.num_envs):
            self._enter(row, episode=0)
        self._envs.begin({row: self._seed(row) for row in range(self.num_envs)})
        self._on_device = None
        return self.observations()

    def step(self, action: Tensor) -> Step:
        self._tell_of_restarts()
        if len(action) != self.num_envs:
            raise ValueError(f"{len(action)} actions were given to {self.num_envs} environments")
        actions = env_actions(self._act_space, action.cpu().numpy())
        self._log.append(actions, longest=int(self._steps.max()) + 1)
        now = self._table
        now.action[:] = actions
        self._envs.step()
        self._steps += 1
        for row in np.flatnonzero(now.terminated | now.truncated).tolist():
            self._enter(row, self._episode[row] + 1)
        self._on_device = self._upload(self._host)
        return Step(**self._on_device, episode_info={}, any_truncated=bool(now.truncated.any()))

    def step_numpy(self, actions: np.ndarray) -> None:
        """The environments alone, with nothing around them."""
        self._table.action[:] = actions
        self._envs.step()

    def observations(self) -> Tree:
        """The current observations, as the last reset, step or restore left them; [B, ...]."""
        self._tell_of_restarts()
        if self._on_device is None:
            self._on_device = self._upload(self._host)
        obs: Tree = self._on_device["obs"]
        return obs

    def on_iteration_start(self, clock: TrainState) -> None:
        """A Gymnasium environment knows nothing of the run's time."""

    # What is saved with the run

    def shared_state(self) -> StateDict:
        return {}

    def load_shared_state(self, state: StateDict) -> None:
        """Nothing is shared: each lane has its own environments."""

    def lane_state(self, lane: int) -> StateDict:
        """Episodes, steps and observations of E environments, and the actions of those episodes, end to end."""
        rows = self._lanes.lane_slice(lane, self._share)
        steps = self._steps[rows]
        # An episode past the cap is saved without its actions, which tells the restore to begin another.
        logged = np.where(steps <= self._config.max_replay_steps, steps, 0)
        actions = [self._log.last(row, count) for row, count in zip(range(self.num_envs)[rows], logged, strict=True)]
        return {
            "episode": torch.tensor(self._episode[rows]),
            "steps": torch.tensor(steps),
            "logged": torch.tensor(logged),
            "actions": torch.from_numpy(np.concatenate(actions)),
        } | {name: obs[rows].clone() for name, obs in named_leaves(self._host["obs"], "obs").items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        """Replay every episode; where that does not lead to the saved observation, begin the next one."""
        self._on_device = None
        who, saved = f"{self._config.id}, lane {lane}", self.lane_state(lane)
        taken = state.get("actions", saved["actions"])
        if taken.dim() == 0 or len(taken) > self._share * self._config.max_replay_steps:
            raise ValueError(
                f"{who}: the saved actions are more than the {self._config.max_replay_steps:,} of an episode."
            )
        saved["actions"] = taken.clone()
        load_into(saved, state, who)  # for its checks of names and shapes
        episodes, steps, logged = (saved[name].tolist() for name in ("episode", "steps", "logged"))
        if min(episodes + steps + logged) < 0 or sum(logged) != len(saved["actions"]) or max(episodes) >= 2**62:
            raise ValueError(f"{who}: the saved episodes and their actions do not fit together.")
        if not actions_valid(self._act_space, saved["actions"].numpy()):
            raise ValueError(f"{who}: the saved actions are none that {self._act_space} allows.")
        actions = saved["actions"].split(logged)
        rows = range(self.num_envs)[self._lanes.lane_slice(lane, self._share)]
        for row, episode in zip(rows, episodes, strict=True):
            self._enter(row, episode)
        self._envs.begin({row: self._seed(row) for row in rows})
        complete = [place for place in range(self._share) if steps[place] == logged[place]]
        through = self._envs.replay({rows[place]: actions[place].numpy() for place in complete})
        lost = []
        for place, row in enumerate(rows):
            if row in through and self._sees(row, saved, place):
                self._log.put(row, actions[place].numpy())
                self._steps[row] = steps[place]
            else:
                self._enter(row, episodes[place] + 1)
                lost.append(row)
        self._envs.begin({row: self._seed(row) for row in lost})
        self._restarted += len(lost)

    # What is shown

    def render_text(self, env: int) -> str:
        if "ansi" in self._modes:
            return self._envs.render_text(env)
        seen = "  ".join(
            f"{name} {np.array2string(obs[env].numpy(), precision=3, threshold=12)}"
            for name, obs in named_leaves(self._host["obs"], "obs").items()
        )
        return f"{self._config.id}  step {self._steps[env]}  return {self._table.total[env]:.1f}  {seen}"

    def render(self, env: int) -> np.ndarray:
        if "rgb_array" not in self._modes:
            raise ConfigError(f"{self._config.id} cannot draw pictures.", "Watch it as text.")
        return self._envs.render(env)

    def close(self) -> None:
        self._envs.close()

    # How it is done

    def _enter(self, row: int, episode: int) -> None:
        """Note that an environment is at the start of an episode, and have the seed of its next one ready."""
        self._episode[row], self._steps[row] = episode, 0
        self._table.seed[row] = self._seed(row, ahead=1)

    def _seed(self, row: int, ahead: int = 0) -> int:
        """The seed of an environment's current episode, or of one that is still ahead."""
        return self._streams[row].draw_seed(self._episode[row] + ahead, bits=31)

    def _sees(self, row: int, saved: StateDict, place: int) -> bool:
        """Whether the current observation is the saved one, bit for bit (a NaN equals itself)."""
        current = named_leaves(self._host["obs"], "obs")
        return all(obs[row].numpy().tobytes() == saved[name][place].numpy().tobytes() for name, obs in current.items())

    def _tell_of_restarts(self) -> None:
        """Warn once of a whole restore, which comes lane by lane."""
        restarted, self._restarted = self._restarted, 0
        if restarted:
            warnings.warn(
                f"{self._config.id}: {restarted} of the {self.num_envs} environments here could not be restored, "
                "because replaying their actions led elsewhere or because their episode was longer than "
                f"max_replay_steps ({self._config.max_replay_steps}). They began their next episode instead: "
                "training goes "
                "on "
                "soundly, but not as the uninterrupted run would have.",
                stacklevel=3,
            )


class ActionLog:
    """The newest actions of all environments, reaching back to the start of the longest current episode."""

    def __init__(self, space: Space[Any], count: int, cap: int) -> None:
        self._blank = np.zeros((count, *(space.shape or ())), space.dtype)  # [B, ...]
        self._cap = cap
        self._steps: deque[np.ndarray] = deque()

    def append(self, actions: np.ndarray, longest: int) -> None:
        """Add one step, and forget what is older than the `longest` episode or the cap."""
        self._steps.append(actions.copy())  # an environment may scale its action in place
        while len(self._steps) > min(longest, self._cap):
            self._steps.popleft()

    def last(self, row: int, count: int) -> np.ndarray:
        """The last `count` actions of an environment; [count, ...]."""
        newest = islice(self._steps, len(self._steps) - count, None)
        taken = [actions[row] for actions in newest]
        return np.array(taken, self._blank.dtype).reshape(count, *self._blank.shape[1:])

    def put(self, row: int, actions: np.ndarray) -> None:
        """Make these the last actions of an environment."""
        while len(self._steps) < len(actions):
            self._steps.appendleft(self._blank.copy())
        for step, action in zip(reversed(self._steps), reversed(actions), strict=False):
            step[row] = action


def _table(observations: Space[Any], actions: Space[Any], count: int) -> SharedArrays:
    """Zeros for `count` environments."""

    def column(dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)  # [B]

    tensors = SharedArrays(
        action=torch.zeros((count, *(actions.shape or ())), dtype=tensor_dtype(actions)),  # [B, ...]
        seed=torch.zeros(count, dtype=torch.int64),
        obs=allocate(observations, count),
        reward=column(torch.float32),
        terminated=column(torch.bool),
        truncated=column(torch.bool),
        final_obs=allocate(observations, count),
        total=torch.zeros(count, dtype=torch.float64),
    )
    return SharedArrays(*(tree_map(Tensor.numpy, part) for part in tensors))  # the same memory


def _survey(config: GymConfig) -> tuple[dict[str, Any], list[str], Space[Any], Space[Any]]:
    """How to make such environments, the ways in which they can draw, and their spaces of observations and actions."""
    options: dict[str, Any] = {"disable_env_checker": True, **config.env_kwargs}
    if config.mask_velocity:
        options["hidden"] = _velocities(config.id)
    probe = make(config.id, options)
    probe.close()
    modes = probe.metadata.get("render_modes") or []
    drawing = next((mode for mode in ("rgb_array", "ansi") if mode in modes), None)
    if drawing:
        options = {"render_mode": drawing, **options}  # costs nothing until a picture is asked for
    return options, modes, probe.observation_space, probe.action_space


def _velocities(id: str) -> list[int]:
    name = id.rpartition("-v")[0]
    if name not in VELOCITIES:
        raise ConfigError(
            f"which features of {id} are velocities is not known.",
            f"Leave --task.mask-velocity out, or take one of {', '.join(VELOCITIES)}.",
        )
    return list(VELOCITIES[name])


@contextmanager
def _explained(id: str) -> Iterator[None]:
    """Turn what Gymnasium says when an environment cannot be made into what to do about it."""
    try:
        yield
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ConfigError(f"{id} needs a package that is not installed.", str(error)) from error
    except TypeError as error:
        raise ConfigError(f"{id} cannot be made: {error}.", "Mend the kwargs of the task.") from error
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(id, gymnasium.registry, n=2)
        elsewhere = "Write the id of another package's environment with its module, as in ale_py:ALE/Pong-v5."
        raise ConfigError(
            f"{id} is not a registered environment.", f"Did you mean {' or '.join(near)}?" if near else elsewhere
        ) from error
