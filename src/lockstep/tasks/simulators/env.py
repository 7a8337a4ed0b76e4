"""Batched tensor simulators as a task: one instance per lane, and tensors that stay on their device.

A step never waits for the device: no value is read on the host, and no branch or shape depends on data.

Shapes: E environments per lane, B local environments in lane order.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.protocols import StateDict, Step
from lockstep.pytree import Tree, first_leaf, load_into, named_leaves, tree_map
from lockstep.rng import RandomStream
from lockstep.tasks.gym.env_class import class_id
from lockstep.tasks.gym.env_file import env_file, with_absolute_path
from lockstep.tasks.simulators.factory import find_factory
from lockstep.tasks.simulators.forms import GymnasiumForm, RslRlForm, StateAccess, adapt, final_obs, metric
from lockstep.tasks.simulators.observations import ObsGroups, space_of

POINT_MASS = "lockstep.tasks.simulators.point_mass:make_env"


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig(VecEnv.Config):
    """Settings of a batched simulator. Every number is for the whole run, not for one process."""

    make: str = POINT_MASS
    """Function that makes a simulator: `my_sim.py:make_env` or `package.module:function`. It is called once per lane
    with `num_envs` and, if it takes them, `device` and `seed`. From Python, it may be the function itself."""
    num_envs: int = 256
    """Number of environments in the whole run. Each lane has an instance with an equal share of them."""
    env_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further keyword arguments for the function."""
    policy_groups: tuple[str, ...] = ()
    """Observation groups that policy and critic see. Empty: `policy` or `actor`; else all that are not for the critic
    only."""
    critic_groups: tuple[str, ...] = ()
    """Observation groups that only the critic sees. Empty: `critic` and `privileged_state`, if there are any."""
    clip_actions: float | None = None
    """Largest absolute value of an action feature. None: actions of the rsl_rl form are not clipped, those of the
    Gymnasium form to the bounds of the action space."""
    info_keys: tuple[str, ...] = ("success",)
    """Metrics of the simulator that are averaged over episodes and logged, as `rollout/ep_KEY_mean` and
    `eval/KEY_mean`. They are read in the step that ends an episode, from its extras: `episode`, `log` or `final_info`.
    A key that no episode reports is not logged."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = ("info_keys",)

    def __post_init__(self) -> None:
        make: Any = self.make
        if callable(make):
            object.__setattr__(self, "make", class_id(make))
        if self.clip_actions is not None and self.clip_actions <= 0:
            raise ConfigError(f"clip_actions is {self.clip_actions}.", "Use a value above 0, or none.")

    @property
    def code_file(self) -> Path | None:
        """Python file of the user that this task executes."""
        return env_file(self.make)

    def with_absolute_paths(self) -> "SimulatorConfig":
        """Resolve a file that the user named, against the working directory."""
        return replace(self, make=with_absolute_path(self.make))


class SimulatorEnvs(VecEnv):
    """The instances of the local lanes."""

    Config = SimulatorConfig
    config: SimulatorConfig

    def setup(self) -> None:
        config = self.config
        self._factory = find_factory(config.make, config.env_kwargs)
        self._groups = ObsGroups(config.policy_groups, config.critic_groups)
        self._streams = [RandomStream(self.lanes.seed, "simulator", lane) for lane in self.lanes.local]
        self._starts = [0] * len(self.lanes)
        """Number of the last start of each instance, of which its seed is a function."""
        self._simulators = [self._make(index) for index in range(len(self.lanes))]
        first = self._simulators[0]
        self.action_space, self.max_episode_steps = first.action_space, first.max_episode_steps
        if config.clip_actions is not None and isinstance(first.action_space, Box):
            bound = config.clip_actions
            self.action_space = Box(-bound, bound, first.action_space.shape, np.float32)
        self._to_simulator = _action_converter(self.action_space, self.device)
        self._obs: Any = self._join([self._begin(index) for index in range(len(self.lanes))])
        self.observation_space = space_of(self._obs)
        self._is_new = True
        self._restarted = 0
        self._lost_final_obs: Tensor | None = torch.zeros((), dtype=torch.bool, device=self.device)
        """Whether a truncated episode had no last observation. None: this was reported."""

    def reset(self) -> Tree:
        if not self._is_new:
            self._starts = [0] * len(self.lanes)
            self._obs = self._join([self._begin(index) for index in range(len(self.lanes))])
        self._is_new = False
        return self.observations()

    def observations(self) -> Tree:
        self._warn_about_restarts()
        obs: Tree = self._obs
        return obs

    def step(self, action: Tensor) -> Step:
        self._warn_about_restarts()
        if len(action) != self.num_envs:
            raise ValueError(f"{len(action)} actions were given to {self.num_envs} environments")
        actions = self._to_simulator(action).split(self.envs_per_lane)
        steps = [simulator.step(part) for simulator, part in zip(self._simulators, actions, strict=True)]
        # Copies: an instance may write its next observation to the same tensor.
        obs = self._join([step.obs for step in steps])
        ends = [final_obs(step) for step in steps]
        reward, terminated, truncated = (torch.cat(x) for x in zip(*(step[1:4] for step in steps), strict=True))
        if any(end is None for end in ends):
            # Bootstrap from the observation before the step, as rsl_rl does: the one after it is of another episode.
            last = self._join_parts(
                [self._rows(self._obs, i) if end is None else self._groups(end) for i, end in enumerate(ends)]
            )
            if self._lost_final_obs is not None:
                lost = [step.truncated.any() for step, end in zip(steps, ends, strict=True) if end is None]
                self._lost_final_obs |= torch.stack(lost).any()
        else:
            last = self._join(ends)
        info = {
            key: torch.cat([metric(step.extras, key, step.reward) for step in steps]) for key in self.config.info_keys
        }
        self._obs = obs
        return Step(obs, reward, terminated, truncated, last, info)

    def on_iteration_start(self, clock: TrainState) -> None:
        """Report once if truncated episodes have no last observation. This is the only value read on the host."""
        if self._lost_final_obs is None or not self._lost_final_obs.item():
            return
        self._lost_final_obs = None
        warnings.warn(
            f"{self.config.make}: the simulator does not return the last observation of an episode "
            "(extras['final_obs']), so truncated episodes are bootstrapped from the observation before it. Their "
            "values are one step old, which matters most for short episodes and fast changes.",
            stacklevel=2,
        )

    def close(self) -> None:
        for simulator in self._simulators:
            _close(simulator.simulator)

    # Saved state

    def lane_state(self, lane: int) -> StateDict:
        """Return observations and starts of a lane, and the state of its instance if it offers one."""
        return dict(named_leaves(self._saved(lane)))

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        """Load the state of the instance. If it offers none, start new episodes with the next seed."""
        index, saved = self.lanes.local.index(lane), self._saved(lane)
        load_into(named_leaves(saved), state, f"{self.config.make}, lane {lane}")
        starts = int(saved["starts"])
        if not 0 <= starts < 2**31:
            raise ValueError(f"{self.config.make}, lane {lane}: {starts} starts were saved. Use another checkpoint.")
        self._starts[index], self._is_new = starts, False
        obs = saved["obs"]
        if "simulator" in saved:
            StateAccess(self._simulators[index].simulator).write(saved["simulator"])
        else:
            self._starts[index] += 1
            obs = self._groups(self._begin(index))
            self._restarted += self.envs_per_lane
        tree_map(lambda x, new: x.copy_(new), self._rows(self._obs, index), obs)

    def _saved(self, lane: int) -> dict[str, Any]:
        """Return copies of everything that is saved of a lane."""
        index = self.lanes.local.index(lane)
        saved = {
            "obs": tree_map(torch.clone, self._rows(self._obs, index)),
            "starts": torch.tensor(self._starts[index]),
        }
        state = StateAccess(self._simulators[index].simulator).read()
        return saved if state is None else saved | {"simulator": state}

    # Rendering

    def render_text(self, env: int) -> str:
        return "  ".join(
            f"{name} {np.array2string(obs[env].cpu().numpy(), precision=3, threshold=12)}"
            for name, obs in named_leaves(self._obs, "obs").items()
        )

    def render(self, env: int) -> np.ndarray:
        index, row = divmod(env, self.envs_per_lane)
        render = getattr(self._simulators[index].simulator, "render", None)
        image = None if render is None else render()
        if image is None:
            raise ConfigError(f"{self.config.make} does not render images.", "Render it as text.")
        frames = np.asarray(image.cpu() if isinstance(image, Tensor) else image)
        return np.asarray(frames[row] if frames.ndim == 4 else frames, np.uint8)

    def render_title(self, env: int) -> str:
        return self.config.make.rpartition(":")[0].rpartition("/")[2]

    # Helpers

    def _make(self, index: int) -> RslRlForm | GymnasiumForm:
        """Make the instance of a local lane."""
        made = self._factory(self.envs_per_lane, self.device, self._seed(index))
        simulator = adapt(made, self.config.make)
        if simulator.num_envs != self.envs_per_lane:
            _close(made)
            raise ConfigError(
                f"{self.config.make} was called with num_envs={self.envs_per_lane} and returned a simulator of "
                f"{simulator.num_envs} environments.",
                "Use the argument num_envs: each lane has an instance with its share of --task.num-envs.",
            )
        return simulator

    def _begin(self, index: int) -> Any:
        """Start new episodes in an instance with its seed; return observations [E, ...]."""
        obs = self._simulators[index].start(self._seed(index))
        if obs is None:  # only the function of the user takes a seed
            _close(self._simulators[index].simulator)
            self._simulators[index] = self._make(index)
            obs = self._simulators[index].start(self._seed(index))
        device = first_leaf(self._groups(obs)).device
        if device.type != self.device.type:
            raise ConfigError(
                f"{self.config.make} returns observations on {device}, but the run is on {self.device}.",
                f"Give the argument device to the simulator, or use --run.device {device.type}.",
            )
        return obs

    def _seed(self, index: int) -> int:
        return self._streams[index].draw_seed(self._starts[index], bits=31)

    def _join(self, observations: list[Any]) -> Tree:
        return self._join_parts([self._groups(obs) for obs in observations])

    def _join_parts(self, parts: list[Tree]) -> Tree:
        joined: Tree = tree_map(lambda *x: torch.cat(x), *parts)
        return joined

    def _rows(self, tree: Tree, index: int) -> Any:
        """Return the rows of a local lane."""
        first = index * self.envs_per_lane
        return tree_map(lambda x: x[first : first + self.envs_per_lane], tree)

    def _warn_about_restarts(self) -> None:
        """Warn once per restore, although lanes are restored one by one."""
        restarted, self._restarted = self._restarted, 0
        if restarted:
            warnings.warn(
                f"{self.config.make}: the simulator cannot restore its state (get_state and set_state), so the "
                f"{restarted} environments of this process start new episodes with new seeds. Training continues "
                "correctly, but not exactly as the uninterrupted run would have.",
                stacklevel=3,
            )


def _action_converter(space: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function from actions of the policy to those of the simulator."""
    if isinstance(space, Box):
        if not np.isfinite(space.low).any() and not np.isfinite(space.high).any():
            return lambda action: action
        low, high = (torch.from_numpy(bound).to(device) for bound in (space.low, space.high))
        return lambda action: torch.clamp(action, low, high)
    if isinstance(space, Discrete):
        return lambda action: action
    raise ConfigError(f"actions of {space} are not supported by simulators.", "Use a Box or Discrete.")


def _close(simulator: Any) -> None:
    if hasattr(simulator, "close"):
        simulator.close()
