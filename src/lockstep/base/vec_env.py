"""Base class of environments.

Shapes: L local lanes, E environments per lane, B = L x E local environments in lane order.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from lockstep.base.config_binding import Configurable
from lockstep.base.data_splits import DataSplits
from lockstep.base.env_rendering import EnvRendering
from lockstep.clock import TrainState
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step
from lockstep.pytree import Tree, load_into
from lockstep.rng import RandomStream


class VecEnv(Configurable, EnvRendering):
    """Base class of tasks: environments of the local lanes, stepped together.

    `setup` can read the attributes `config`, `lanes`, `device`, `envs_per_lane` (E) and `num_envs` (B).
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(DataSplits):
        """Settings of an environment. Every number is for the whole run, not for one process."""

        num_envs: int = 64
        """Number of environments, over all processes."""
        owner: ClassVar[Any] = None
        changeable_on_resume: ClassVar[tuple[str, ...]] = ()
        """Settings that may be changed when a run is resumed or forked: they change nothing that is saved."""

        def build(self, lanes: Lanes, device: torch.device) -> Any:
            """Build the environments of the local lanes."""
            return self.owner(self, lanes, device)

    observation_space: Space[Any]
    """Observation space of one environment."""
    action_space: Space[Any]
    """Action space of one environment."""
    max_episode_steps: int | None = None
    """Maximum steps of an episode, if known. Limits the cost of evaluations."""

    def __init__(self, config: Any, lanes: Lanes, device: torch.device) -> None:
        self.config, self.lanes, self.device = config, lanes, device
        self.envs_per_lane = lanes.per_lane(config.num_envs, "num_envs")
        self.num_envs = len(lanes) * self.envs_per_lane
        """Number of local environments, B."""
        self._registered: StateDict = {}
        self.setup()
        self.reset()

    def setup(self) -> None:
        """Set `observation_space` and `action_space`, allocate tensors, and register the ones that are state."""
        raise NotImplementedError(f"{type(self).__name__} must implement setup().")

    def reset(self) -> Tree:
        """Start the first episode of every environment; return observations [B, ...]."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset().")

    def observations(self) -> Tree:
        """Return the current observations [B, ...], also after a restore."""
        raise NotImplementedError(f"{type(self).__name__} must implement observations().")

    def step(self, action: Tensor) -> Step:
        """Take one action in every environment. An environment whose episode ends starts the next one at once.

        Args:
            action: Actions [B, ...] on the run's device.

        Returns:
            Observations, rewards, episode ends and episode metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement step().")

    def register_state(self, name: str, values: "Tensor | np.ndarray") -> Any:
        """Save values [B, ...], each row with the lane that owns it, and return them. Change them in place only."""
        self._registered[name] = values if isinstance(values, Tensor) else torch.from_numpy(values)
        return values

    @property
    def env_indices(self) -> range:
        """Indices of the local environments in the whole run."""
        return range(self.lanes.local.start * self.envs_per_lane, self.lanes.local.stop * self.envs_per_lane)

    def env_streams(self, name: str) -> list[RandomStream]:
        """Return one random stream per local environment, keyed by the name and the index in the whole run."""
        return [RandomStream(self.lanes.seed, name, index) for index in self.env_indices]

    def on_iteration_start(self, clock: TrainState) -> None:
        """Read the clock, for example to change the difficulty. Called once per iteration."""

    def close(self) -> None:
        """Release resources."""

    def shared_state(self) -> StateDict:
        """Return tensors that are equal on all processes."""
        return {}

    def load_shared_state(self, state: StateDict) -> None:
        """Load the tensors of `shared_state`."""
        load_into(self.shared_state(), state, type(self).__name__)

    def lane_state(self, lane: int) -> StateDict:
        """Return a copy of the registered rows of one lane."""
        return {name: values.clone() for name, values in self.live_state(lane).items()}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        """Load the registered rows of one lane. Raise ValueError, and change nothing, if they are not valid."""
        before, live, owner = self.lane_state(lane), self.live_state(lane), f"{type(self).__name__}, lane {lane}"
        load_into(live, state, owner)
        if not self.is_valid_state(live):
            load_into(live, before, owner)
            raise ValueError(f"{owner}: the saved environments are not in a valid state. Use another checkpoint.")

    def is_valid_state(self, state: StateDict) -> bool:
        """Return whether the environments of a lane can be in a state that was loaded: rows by name, [E, ...] each."""
        return True

    def live_state(self, lane: int) -> StateDict:
        """Return views of the registered rows of one lane, [E, ...] each."""
        rows = self.lanes.lane_slice(lane, self.envs_per_lane)
        return {name: values[rows] for name, values in self._registered.items()}
