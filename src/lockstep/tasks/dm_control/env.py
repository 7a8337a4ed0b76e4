"""The DeepMind control suite: any of its tasks, or several at once for one agent, saved to the last bit.

With several tasks environment i plays task i modulo their number, for ever. Observations are then padded to the longest
and come with the task's number; of an action a task takes as many features as it has.

Shapes: E environments a lane, B local environments, D features of an observation, K of an action.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step, SubtaskSpec
from lockstep.pytree import Tree, load_into
from lockstep.rng import RandomStream
from lockstep.tasks.dm_control.suite import FRAMES, PIXELS, SimulatedTask, resolve
from lockstep.transfer import Uploader

CHANCE = 626
"""Numbers of a generator's state."""


@dataclass(frozen=True, kw_only=True)
class DMControlConfig:
    """Settings of a task of the control suite. Every number but `threads` is for the whole run."""

    tasks: tuple[str, ...] = ("walker-run",)
    """A task such as walker-run or cup-catch, several of them for one agent, or the set mt30."""
    num_envs: int = 8
    """Environments played side by side."""
    action_repeat: int = 2
    """How often each action is taken; a sample is a decision, so two steps of the simulation's own counting."""
    episode_length: int | None = None
    """Decisions of an episode; none plays it as long as the suite does, 500 of them."""
    pixels: bool = False
    """Show pictures, three of 64 x 64 in a row, instead of the state."""
    threads: int = 0
    """Threads that step the environments of each process, for speed alone; pays for large bodies and many cores."""

    def __post_init__(self) -> None:
        if self.action_repeat < 1 or self.threads < 0 or (self.episode_length is not None and self.episode_length < 1):
            raise ConfigError(
                f"action_repeat is {self.action_repeat}, episode_length {self.episode_length}, threads {self.threads}.",
                "Use 1 or more of the first two, and 0 or more threads.",
            )

    @property
    def num_tasks(self) -> int:
        """How many tasks the environments share."""
        return len(resolve(self.tasks))

    def build(self, lanes: Lanes, device: torch.device) -> "DMControl":
        return DMControl(self, lanes, device)


class DMControl:
    """The environments of the local lanes."""

    def __init__(self, config: DMControlConfig, lanes: Lanes, device: torch.device) -> None:
        self._config, self._lanes = config, lanes
        self._share = lanes.per_lane(config.num_envs, "num_envs")
        self.num_envs = count = len(lanes) * self._share
        # Keyed by the place in the whole run, so that it does not matter who hosts an environment.
        places = range(lanes.local.start * self._share, lanes.local.stop * self._share)
        self._streams = [RandomStream(lanes.seed, "dmcontrol", place) for place in places]
        names = resolve(config.tasks)
        self._task = torch.tensor([place % len(names) for place in places])
        self._worlds = [self._world(names[task]) for task in self._task.tolist()]
        # One of each task says what all processes must know of it, whichever tasks they play themselves.
        examples = {world.name: world for world in self._worlds}
        examples |= {name: self._world(name) for name in names if name not in examples}
        worlds = [examples[name] for name in names]
        self.parts = tuple(SubtaskSpec(world.name, world.actions, world.length) for world in worlds)
        self._state_size = max(world.state_size() for world in worlds)
        space = _space([world.begin(0) for world in worlds])
        self.action_space = Box(-1.0, 1.0, (max(world.actions for world in worlds),), np.float32)
        self.observation_space = space if len(names) == 1 else _with_task(space, len(names))
        for world in worlds:
            if not any(world is mine for mine in self._worlds):
                world.close()

        self._obs = np.zeros((count, *space.shape), space.dtype)
        self._final = np.zeros_like(self._obs)
        self._reward = np.zeros(count, np.float32)
        self._terminated, self._ended = np.zeros(count, bool), np.zeros(count, bool)
        self._episode = np.zeros(count, np.int64)
        self._total = np.zeros(count)
        """Rewards of the current episode."""
        self._earned = np.zeros(count)
        """Those of the episodes that ended in the last step."""
        self._pool = ThreadPoolExecutor(config.threads) if config.threads and not config.pixels else None
        self._upload = Uploader(device)
        self._shown: Any = None
        """What the last step returned, on the device; None while it is out of date."""

    def _world(self, name: str) -> SimulatedTask:
        return SimulatedTask(name, self._config.action_repeat, self._config.episode_length, self._config.pixels)

    def reset(self) -> Tree:
        for row in range(self.num_envs):
            self._begin(row, episode=0)
        self._shown = None
        return self.observations()

    def step(self, action: Tensor) -> Step:
        if len(action) != self.num_envs:
            raise ValueError(f"{len(action)} actions were given to {self.num_envs} environments")
        self.step_numpy(action.cpu().double().numpy())
        self._show()
        return Step(**self._shown, any_truncated=bool((self._ended & ~self._terminated).any()))

    def step_numpy(self, actions: np.ndarray) -> None:
        """The environments alone, with nothing around them."""
        rows = range(self.num_envs)
        for _ in map(self._act, rows, actions) if self._pool is None else self._pool.map(self._act, rows, actions):
            pass

    def observations(self) -> Tree:
        if self._shown is None:
            self._show()
        obs: Tree = self._shown["obs"]
        return obs

    def _show(self) -> None:
        """Bring what the last step left to the device."""
        truncated = self._ended & ~self._terminated
        self._shown = self._upload(
            {
                "obs": self._seen(self._obs),
                "reward": torch.from_numpy(self._reward),
                "terminated": torch.from_numpy(self._terminated),
                "truncated": torch.from_numpy(truncated),
                "final_obs": self._seen(self._final),
                "episode_info": self._returns(),
            }
        )

    def on_iteration_start(self, clock: TrainState) -> None:
        """The suite knows nothing of the run's time."""

    # What is saved with the run

    def shared_state(self) -> StateDict:
        return {}

    def load_shared_state(self, state: StateDict) -> None:
        """Nothing is shared: each lane has its own environments."""

    def lane_state(self, lane: int) -> StateDict:
        """Where E environments stand: episode, decisions, the simulation, the task's generator, what was seen."""
        rows = self._lanes.lane_slice(lane, self._share)
        state = self._empty()
        for place, world in enumerate(self._worlds[rows]):
            physics = world.physics()
            state["physics"][place, : len(physics)] = torch.from_numpy(physics)
            chance, number = world.chance()
            state["chance"][place], state["number"][place] = torch.from_numpy(chance), number
            state["taken"][place] = world.taken
        mine = {"episode": self._episode, "total": self._total, "obs": self._obs}
        return state | {name: torch.tensor(array[rows]) for name, array in mine.items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        rows, who = self._lanes.lane_slice(lane, self._share), f"{', '.join(self._config.tasks)}, lane {lane}"
        self._shown = None
        saved = self.lane_state(lane)
        load_into(saved, state, who)  # for its checks of names and shapes
        taken, episodes, chance = saved["taken"], saved["episode"], saved["chance"]
        lengths = torch.tensor([world.length for world in self._worlds[rows]])
        fits = (taken >= 0) & (taken < lengths) & (episodes >= 0) & (episodes < 2**62)
        fits &= ((chance >= 0) & (chance < 2**32)).all(1) & (chance[:, 624] <= 624) & (chance[:, 625] <= 1)
        if not fits.all() or not saved["physics"].isfinite().all():
            raise ValueError(f"{who}: the saved worlds cannot have been: episodes, decisions or numbers are none.")
        for place, row in enumerate(range(self.num_envs)[rows]):
            self._episode[row] = int(episodes[place])
            world, obs = self._worlds[row], saved["obs"][place].numpy()
            physics = saved["physics"][place, : world.state_size()].numpy()
            number = float(saved["number"][place])
            world.restore(self._seed(row), int(taken[place]), physics, chance[place].numpy(), number, obs)
            self._obs[row], self._total[row] = obs, float(saved["total"][place])

    def _empty(self) -> StateDict:
        share = self._share
        return {
            "physics": torch.zeros(share, self._state_size, dtype=torch.float64),
            "chance": torch.zeros(share, CHANCE, dtype=torch.int64),
            "number": torch.zeros(share, dtype=torch.float64),
            "taken": torch.zeros(share, dtype=torch.int64),
        }

    # What is shown

    def render_text(self, env: int) -> str:
        world, obs = self._worlds[env], self._obs[env]
        seen = "" if self._config.pixels else np.array2string(obs, precision=2, threshold=24, suppress_small=True)
        return f"{world.name}  decision {world.taken}  return {self._total[env]:.1f}\n{seen}"

    def render(self, env: int) -> np.ndarray:
        return self._worlds[env].draw(240, 320)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for world in self._worlds:
            world.close()

    # How it is done

    def _begin(self, row: int, episode: int) -> None:
        self._episode[row], self._total[row] = episode, 0.0
        self._write(self._obs, row, self._worlds[row].begin(self._seed(row)))

    def _act(self, row: int, action: np.ndarray) -> None:
        world = self._worlds[row]
        outcome = world.act(action[: world.actions])
        self._reward[row], self._terminated[row] = outcome.reward, outcome.terminated
        self._total[row] += outcome.reward
        self._ended[row] = outcome.ended
        if outcome.ended:
            self._write(self._final, row, outcome.obs)
            self._earned[row] = self._total[row]
            self._begin(row, int(self._episode[row]) + 1)
        else:
            self._write(self._obs, row, outcome.obs)

    def _write(self, to: np.ndarray, row: int, obs: np.ndarray) -> None:
        to[row][tuple(map(slice, obs.shape))] = obs  # what is beyond it is padding, and stays zero

    def _seed(self, row: int) -> int:
        """The seed of an environment's current episode."""
        return self._streams[row].draw_seed(int(self._episode[row]), bits=32)

    def _returns(self) -> dict[str, Tensor]:
        """What the episodes that ended came to, by task where there are several; not a number for all others."""
        if len(self.parts) == 1:
            return {}
        earned = torch.tensor(self._earned)
        return {
            f"return/{part.name}": torch.where(self._task == number, earned, torch.nan)
            for number, part in enumerate(self.parts)
        }

    def _seen(self, obs: np.ndarray) -> Tree:
        seen = torch.from_numpy(obs)
        return seen if len(self.parts) == 1 else {"obs": seen, "task": self._task}


def _space(examples: list[np.ndarray]) -> Box:
    """The space of observations that are padded to the longest."""
    if examples[0].dtype == np.uint8:
        return Box(0, 255, (FRAMES * 3, PIXELS, PIXELS), np.uint8)
    return Box(-np.inf, np.inf, (max(len(obs) for obs in examples),), np.float32)


def _with_task(space: Box, tasks: int) -> Dict:
    return Dict([("obs", space), ("task", Box(0, tasks - 1, (), np.int64))])
