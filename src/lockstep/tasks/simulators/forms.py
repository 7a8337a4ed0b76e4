"""Two forms of batched simulators behind one protocol: rsl_rl's `VecEnv`, and Gymnasium with tensors.

A form is recognized by its members, so no simulator is a dependency. No method but `start` waits for the device.

Shapes: E environments of an instance.
"""

import inspect
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.pytree import Tree, tree_map
from lockstep.tasks.gym.spaces import policy_space
from lockstep.tasks.simulators.observations import to_tree

FINAL_OBS = ("final_obs", "final_observation")
"""Names of the last observations of episodes in the extras of a step: Isaac Lab and Gymnasium, ManiSkill."""
COUNTERS = ("episode_length_buf", "_elapsed_steps")
"""Step counters that a simulator may keep outside its state: rsl_rl, ManiSkill."""
STATE_METHODS = (("get_state_dict", "set_state_dict"), ("get_state", "set_state"))


class SimulatorStep(NamedTuple):
    """Results of one step of an instance."""

    obs: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    extras: dict[str, Any]


class Simulator(Protocol):
    """One instance: E environments that are stepped together and start their next episode themselves."""

    num_envs: int
    action_space: Space[Any]
    max_episode_steps: int | None

    def start(self, seed: int) -> Any | None:
        """Start new episodes; return observations [E, ...]. None: only a new instance can be given a seed."""

    def step(self, actions: Tensor) -> SimulatorStep:
        """Take one action [E, ...] in every environment."""


def adapt(simulator: Any, make: str) -> "RslRlForm | GymnasiumForm":
    """Return the adapter for the form of a simulator."""
    if all(hasattr(simulator, name) for name in ("num_envs", "num_actions", "get_observations", "step")):
        return RslRlForm(simulator)
    has_actions = hasattr(simulator, "single_action_space") or hasattr(simulator, "action_space")
    if has_actions and all(hasattr(simulator, name) for name in ("num_envs", "reset", "step")):
        _check_autoreset(simulator, make)
        return GymnasiumForm(simulator)
    raise ConfigError(
        f"{make} returns a {type(simulator).__name__}, which is no batched simulator.",
        "Return an object with num_envs, num_actions, get_observations() and step(actions), as for rsl_rl, or a "
        "Gymnasium environment with num_envs whose step returns tensors.",
    )


class RslRlForm:
    """`step(actions) -> obs, rewards, dones, extras`, with `extras["time_outs"]`: Isaac Lab, mjlab, Genesis."""

    def __init__(self, simulator: Any) -> None:
        self.simulator, self.num_envs = simulator, int(simulator.num_envs)
        self.action_space = Box(-np.inf, np.inf, (int(simulator.num_actions),), np.float32)
        length = getattr(simulator, "max_episode_length", None)
        self.max_episode_steps = None if length is None else int(torch.as_tensor(length).max())
        self._is_new = True

    def start(self, seed: int) -> Any | None:
        if self._is_new:  # the constructor resets it with its seed
            self._is_new = False
            return _with_critic(self.simulator.get_observations())
        reset, reseed = getattr(self.simulator, "reset", None), getattr(self.simulator, "seed", None)
        if reset is not None and "seed" in inspect.signature(reset).parameters:
            return _with_critic(reset(seed=seed))
        if reset is not None and callable(reseed):
            reseed(seed)
            return _with_critic(reset())
        return None

    def step(self, actions: Tensor) -> SimulatorStep:
        obs, reward, dones, extras = self.simulator.step(actions)
        ended, time_outs = _flags(dones), extras.get("time_outs")
        # Without time-outs all ends are terminal, as for rsl_rl.
        truncated = torch.zeros_like(ended) if time_outs is None else ended & _flags(time_outs)
        return SimulatorStep(_with_critic((obs, extras)), _rewards(reward), ended & ~truncated, truncated, extras)


class GymnasiumForm:
    """`step(actions) -> obs, reward, terminated, truncated, info` with tensors: ManiSkill, Isaac Lab's environments."""

    def __init__(self, simulator: Any) -> None:
        self.simulator, self.num_envs = simulator, int(simulator.num_envs)
        space = getattr(simulator, "single_action_space", None)
        self.action_space = policy_space(simulator.action_space if space is None else space)
        spec = getattr(simulator, "spec", None)
        length = getattr(simulator, "max_episode_steps", None) or getattr(spec, "max_episode_steps", None)
        self.max_episode_steps = None if length is None else int(length)

    def start(self, seed: int) -> Any | None:
        return self.simulator.reset(seed=seed)[0]

    def step(self, actions: Tensor) -> SimulatorStep:
        obs, reward, terminated, truncated, info = self.simulator.step(actions)
        terminated = _flags(terminated)
        return SimulatorStep(obs, _rewards(reward), terminated, _flags(truncated) & ~terminated, info)


def final_obs(step: SimulatorStep) -> Any | None:
    """Return the last observations [E, ...] of the episodes that ended in a step; None if the simulator has none."""
    for name in FINAL_OBS:
        if step.extras.get(name) is not None:
            return step.extras[name]
    terminal = step.extras.get("terminal")  # mjlab: rows of the environments that ended
    if terminal is None:
        return None
    rows = terminal["env_ids"]
    return tree_map(lambda x, last: x.index_copy(0, rows, last), to_tree(step.obs), to_tree(terminal["observations"]))


def metric(extras: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """Return a metric of the extras as [E] float32, NaN where it is not reported."""
    last = extras.get("final_info", {})
    places = (extras.get("episode"), extras.get("log"), last.get("episode"), last, extras)
    value = next((place[name] for place in places if place is not None and name in place), None)
    if isinstance(value, Tensor) and value.numel() in (1, len(like)):
        return value.to(like.device, torch.float32).reshape(-1).expand(len(like))
    number = float(value) if isinstance(value, bool | int | float) else torch.nan
    return torch.full_like(like, number, dtype=torch.float32)


class StateAccess:
    """Reads and writes the state of a simulator, if it offers methods for it."""

    def __init__(self, simulator: Any) -> None:
        base = getattr(simulator, "unwrapped", simulator)
        owners = [simulator] if base is simulator else [simulator, base]
        pairs = [(owner, *names) for owner in owners for names in STATE_METHODS]
        self._methods = next((pair for pair in pairs if all(hasattr(pair[0], name) for name in pair[1:])), None)
        self._counters = [(base, name) for name in COUNTERS if isinstance(getattr(base, name, None), Tensor)]

    def read(self) -> Any:
        """Return a copy of the state; None if the simulator offers none."""
        if self._methods is None:
            return None
        owner, getter, _ = self._methods
        state = {"state": _copy(getattr(owner, getter)())}
        return state | {name: getattr(owner, name).clone() for owner, name in self._counters}

    def write(self, state: Any) -> None:
        """Replace the state by one in the form of `read`."""
        assert self._methods is not None
        owner, _, setter = self._methods
        getattr(owner, setter)(state["state"])
        for owner, name in self._counters:
            setattr(owner, name, state[name])


def _copy(state: Any) -> Tree:
    if isinstance(state, Tensor):
        return state.detach().clone()
    if hasattr(state, "items"):
        return {str(name): _copy(part) for name, part in state.items()}
    raise ConfigError(
        f"get_state() of the simulator returns {type(state).__name__}.", "Return a tensor, or a dict of tensors."
    )


def _with_critic(result: Any) -> Any:
    """Return the observations of (observations, extras). The critic's may be in the extras: rsl_rl before version 3."""
    if not isinstance(result, tuple):
        return result
    obs, extras = result
    others = extras.get("observations") if hasattr(extras, "get") else None
    critic = others.get("critic") if others is not None else None
    return {"policy": obs, "critic": critic} if isinstance(obs, Tensor) and critic is not None else obs


def _flags(values: Any) -> Tensor:
    return values.reshape(-1).bool()


def _rewards(values: Any) -> Tensor:
    return values.reshape(-1).float()


def _check_autoreset(simulator: Any, make: str) -> None:
    """Raise ConfigError if a simulator does not start the next episode in the step that ends one."""
    mode = (getattr(simulator, "metadata", None) or {}).get("autoreset_mode")
    is_single = isinstance(simulator, gymnasium.Env)
    automatic = getattr(simulator, "auto_reset", not is_single) or mode is AutoresetMode.SAME_STEP
    if not automatic or mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        raise ConfigError(
            f"{make} returns a {type(simulator).__name__} that does not start the next episode in the step that ends "
            "one.",
            "Wrap it, for example in ManiSkillVectorEnv of mani_skill, or in the wrapper for rsl_rl.",
        )
