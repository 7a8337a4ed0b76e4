"""Gymnasium: any registered environment, one after another in a plain loop, restored by replaying its actions.

Every episode has a seed of its own, made from the run's seed, the environment's global index and the episode's number.
So an environment that cannot hand out its state is saved as its episode's number and the actions taken in it.

Shapes: E environments a lane, B local environments.
"""

import difflib
import warnings
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env, Space
from gymnasium.spaces import Discrete
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import Clock, State, Step
from lockstep.streams import Stream
from lockstep.tasks.spaces import allocate, env_actions, policy_space, store, stored_space
from lockstep.trees import Tree, copy_into, leaves, tree_map


@dataclass(frozen=True, kw_only=True)
class GymConfig:
    """Settings of a Gymnasium task. Every number is for the whole run, not for one process."""

    id: str = "CartPole-v1"
    """Id of the environment; `package:Name-v0` imports the package that registers it."""
    num_envs: int = 8
    """Environments played side by side."""
    kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Options of the environment, as `gymnasium.make` takes them."""
    replay_cap: int = 20_000
    """Longest episode, in steps, whose actions are kept to restore it; a longer one starts anew on resume."""

    def build(self, lanes: Lanes, device: torch.device) -> "GymEnvs":
        return GymEnvs(self, lanes, device)


class GymEnvs:
    """The environments of the local lanes. Observations and actions have the form that `tasks/spaces.py` describes."""

    def __init__(self, config: GymConfig, lanes: Lanes, device: torch.device) -> None:
        self._config, self._lanes, self._device = config, lanes, device
        self._share = lanes.share(config.num_envs, "num_envs")
        self.num_envs = count = len(lanes) * self._share
        self._envs, self._modes = _make(config, count)
        self._obs_space, self._act_space = self._envs[0].observation_space, self._envs[0].action_space
        self.observation_space, self.action_space = stored_space(self._obs_space), policy_space(self._act_space)

        # Keyed by the place in the whole run, so that it does not matter who hosts an environment.
        first = lanes.local.start * self._share
        self._streams = [Stream(lanes.seed, "gym", first + row) for row in range(count)]
        self._episode = np.zeros(count, np.int64)
        self._steps = np.zeros(count, np.int64)
        self._return = np.zeros(count)
        self._log = ActionLog(self._act_space, count, config.replay_cap)
        self._restarted = 0

        self._pinned = device.type == "cuda"
        self._host = Step(
            obs=allocate(self.observation_space, count, self._pinned),
            reward=torch.zeros(count, pin_memory=self._pinned),
            terminated=torch.zeros(count, dtype=torch.bool, pin_memory=self._pinned),
            truncated=torch.zeros(count, dtype=torch.bool, pin_memory=self._pinned),
            final_obs=allocate(self.observation_space, count, self._pinned),
            episode={},
        )
        self._arrays: Any = Step(*(_arrays(part) for part in self._host))  # the same memory

    def reset(self) -> Tree:
        self._await_copies()
        for row in range(self.num_envs):
            self._begin(row, episode=0)
        return self.observe()

    def step(self, action: Tensor) -> Step:
        self._tell_of_restarts()
        actions = env_actions(self._act_space, action.cpu().numpy())
        self._log.append(actions, longest=int(self._steps.max()) + 1)
        self._await_copies()
        now = self._arrays
        for row, (env, move) in enumerate(zip(self._envs, _moves(self._act_space, actions), strict=True)):
            obs, now.reward[row], now.terminated[row], now.truncated[row], _ = env.step(move)
            store(self._obs_space, obs, now.obs, row)
        self._steps += 1
        self._return += now.reward
        for row in np.flatnonzero(now.terminated | now.truncated).tolist():
            for last, obs in zip(leaves(now.final_obs).values(), leaves(now.obs).values(), strict=True):
                last[row] = obs[row]
            self._begin(row, self._episode[row] + 1)
        return Step(*(self._on_device(part) for part in self._host))

    def observe(self) -> Tree:
        """The current observations, as the last reset, step or restore left them; [B, ...]."""
        self._tell_of_restarts()
        return self._on_device(self._host.obs)

    def advance(self, clock: Clock) -> None:
        """A Gymnasium environment knows nothing of the run's time."""

    # What is saved with the run

    def shared_state(self) -> State:
        return {}

    def load_shared_state(self, state: State) -> None:
        """Nothing is shared: each lane has its own environments."""

    def lane_state(self, lane: int) -> State:
        """Episodes, steps and observations of E environments, and the actions of those episodes, end to end."""
        rows = self._rows(lane)
        steps = self._steps[rows]
        # An episode past the cap is saved without its actions, which tells the restore to begin another.
        logged = np.where(steps <= self._config.replay_cap, steps, 0)
        actions = [self._log.last(row, count) for row, count in zip(range(self.num_envs)[rows], logged, strict=True)]
        return {
            "episode": torch.tensor(self._episode[rows]),
            "steps": torch.tensor(steps),
            "logged": torch.tensor(logged),
            "actions": torch.from_numpy(np.concatenate(actions)),
        } | {name: obs[rows].clone() for name, obs in leaves(self._host.obs, "obs").items()}

    def load_lane_state(self, lane: int, state: State) -> None:
        """Replay every episode; where that does not lead to the saved observation, begin the next one."""
        self._await_copies()
        saved = self.lane_state(lane) | {"actions": state["actions"].clone()}
        copy_into(saved, state, f"{self._config.id}, lane {lane}")  # for its checks of names and shapes
        episodes, steps, logged = (saved[name].tolist() for name in ("episode", "steps", "logged"))
        actions = saved["actions"].split(logged)
        for place, row in enumerate(range(self.num_envs)[self._rows(lane)]):
            self._begin(row, episodes[place])
            complete = steps[place] == logged[place]
            if not (complete and self._replay(row, actions[place].numpy()) and self._sees(row, saved, place)):
                self._begin(row, episodes[place] + 1)
                self._restarted += 1

    # What is shown

    def text(self, env: int) -> str:
        if "ansi" in self._modes:
            # The mode was fixed when the environment was made, but those that draw text look at it here and only here.
            drawn = self._envs[env].unwrapped
            before, drawn.render_mode = drawn.render_mode, "ansi"
            try:
                return str(drawn.render())
            finally:
                drawn.render_mode = before
        seen = "  ".join(
            f"{name} {np.array2string(obs[env].numpy(), precision=3, threshold=12)}"
            for name, obs in leaves(self._host.obs, "obs").items()
        )
        return f"{self._config.id}  step {self._steps[env]}  return {self._return[env]:.1f}  {seen}"

    def frame(self, env: int) -> np.ndarray:
        if "rgb_array" not in self._modes:
            raise ConfigError(f"{self._config.id} cannot draw pictures.", "Watch it as text.")
        try:
            return np.asarray(self._envs[env].render(), np.uint8)  # [height, width, 3]
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"{self._config.id} needs a package to draw pictures.", str(error)) from error

    def close(self) -> None:
        for env in self._envs:
            env.close()

    # How it is done

    def _begin(self, row: int, episode: int) -> None:
        obs, _ = self._envs[row].reset(seed=self._streams[row].number(episode, bits=31))
        self._episode[row], self._steps[row], self._return[row] = episode, 0, 0.0
        store(self._obs_space, obs, self._arrays.obs, row)

    def _replay(self, row: int, actions: np.ndarray) -> bool:
        """Take the actions of an episode again; False if it ends on the way."""
        self._log.put(row, actions)
        for move in _moves(self._act_space, actions):
            obs, reward, terminated, truncated, _ = self._envs[row].step(move)
            store(self._obs_space, obs, self._arrays.obs, row)
            self._steps[row] += 1
            self._return[row] += np.float32(reward)
            if terminated or truncated:
                return False
        return True

    def _sees(self, row: int, saved: State, place: int) -> bool:
        """Whether the current observation is the saved one, bit for bit (a NaN equals itself)."""
        current = leaves(self._host.obs, "obs")
        return all(obs[row].numpy().tobytes() == saved[name][place].numpy().tobytes() for name, obs in current.items())

    def _tell_of_restarts(self) -> None:
        """Warn once of a whole restore, which comes lane by lane."""
        restarted, self._restarted = self._restarted, 0
        if restarted:
            warnings.warn(
                f"{self._config.id}: {restarted} of the {self.num_envs} environments here could not be restored, "
                "because replaying their actions led elsewhere or because their episode was longer than "
                f"replay_cap ({self._config.replay_cap}). They began their next episode instead: training goes on "
                "soundly, but not as the uninterrupted run would have.",
                stacklevel=3,
            )

    def _rows(self, lane: int) -> slice:
        first = self._lanes.local.index(lane) * self._share
        return slice(first, first + self._share)

    def _on_device(self, tree: Any) -> Any:
        return tree_map(lambda host: host.to(self._device, non_blocking=self._pinned), tree)

    def _await_copies(self) -> None:
        """The buffers may be on their way to the GPU until its stream has come this far."""
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()


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


def _arrays(tree: Any) -> Any:
    """A tree of host tensors as numpy sees it."""
    return {name: _arrays(part) for name, part in tree.items()} if isinstance(tree, dict) else tree.numpy()


def _moves(space: Space[Any], actions: np.ndarray) -> list[Any]:
    """Actions one by one, as an environment takes them: a choice is a plain int, for some look it up in a dict."""
    return actions.tolist() if isinstance(space, Discrete) else list(actions)


def _make(config: GymConfig, count: int) -> tuple[list[Env], list[str]]:
    """Equal environments, able to draw themselves where the id offers it, and the ways in which it can draw."""
    options: dict[str, Any] = {"disable_env_checker": True, **config.kwargs}
    try:
        probe = gymnasium.make(config.id, **options)
        modes = probe.metadata.get("render_modes") or []
        probe.close()
        drawing = next((mode for mode in ("rgb_array", "ansi") if mode in modes), None)
        if drawing:
            options = {"render_mode": drawing, **options}  # costs nothing until a picture is asked for
        return [gymnasium.make(config.id, **options) for _ in range(count)], modes
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ConfigError(f"{config.id} needs a package that is not installed.", str(error)) from error
    except TypeError as error:
        raise ConfigError(f"{config.id} cannot be made: {error}.", "Mend the kwargs of the task.") from error
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(config.id, gymnasium.registry, n=2)
        elsewhere = "Write the id of another package's environment with its module, as in ale_py:ALE/Pong-v5."
        raise ConfigError(
            f"{config.id} is not a registered environment.", f"Did you mean {' or '.join(near)}?" if near else elsewhere
        ) from error
