"""Base class of algorithms.

Shapes: L local lanes, E environments per lane, B = L x E local environments in lane order.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lockstep.base.config_binding import Configurable
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.protocols import LaneState, Policy, StateDict
from lockstep.pytree import Tree, load_into
from lockstep.rng import seeded_init


class Algorithm(Configurable):
    """Base class of algorithms: one agent that learns one task.

    `setup` can read the attributes `config`, `task`, `runtime`, `lanes`, `envs_per_lane` (E) and `samples`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of an algorithm. Every number is for the whole run, not for one process."""

        owner: ClassVar[Any] = None
        changeable_on_resume: ClassVar[tuple[str, ...]] = ()
        """Settings that may be changed when a run is resumed or forked: they change nothing that is saved."""

        def validate(self, task: Any, run: RunConfig) -> None:
            """Check the settings before any process starts.

            Args:
                task: Settings of the task.
                run: Settings of the run.

            Raises:
                ConfigError: A setting is invalid. By default: lanes cannot share `num_envs` evenly.
            """
            if hasattr(task, "num_envs"):  # data sets have none
                Lanes(resolve_lanes(run, 1).lanes or 0, range(0), run.seed).per_lane(task.num_envs, "num_envs")

        def check_task(self, task: Any) -> None:
            """Check the settings against the task when a new run has built it, before the networks are built.

            Args:
                task: The environments or the data set.

            Raises:
                ConfigError: A setting does not suit the task.
            """

        def samples_per_iteration(self, task: Any) -> int:
            """Return the global samples of one iteration.

            In environments these are `num_envs` times `rollout_steps`, on a data set `batch_size`; without such a
            field, 1 is taken.
            """
            if hasattr(task, "num_envs"):
                return int(task.num_envs * getattr(self, "rollout_steps", 1))
            return int(getattr(self, "batch_size", 1))

        def build(self, task: Any, runtime: Any) -> Any:
            """Build the algorithm."""
            return self.owner(self, task, runtime)

    @classmethod
    def require_methods(cls) -> None:
        """Raise ConfigError if the class does not implement every required method."""
        required = ("setup", "collect", "update", "policy")
        missing = [f"{name}()" for name in required if getattr(cls, name) is getattr(Algorithm, name)]
        if missing:
            raise ConfigError(
                f"{cls.__name__} has no {' and no '.join(missing)}.",
                f"Implement {'them' if len(missing) > 1 else 'it'} as in docs/customization/algorithm.md.",
            )

    eval_share: ClassVar[float] = 0.05
    """Maximum environment steps of an automatic evaluation, relative to the samples between evaluations. Larger if
    learning from a sample takes longer than collecting it."""

    def __init__(self, config: Any, task: Any, runtime: Any) -> None:
        self.config, self.task, self.runtime, self.lanes = config, task, runtime, runtime.lanes
        self.envs_per_lane = getattr(task, "num_envs", 0) // len(self.lanes)
        self.samples = self.lanes.num_lanes * self.envs_per_lane * getattr(config, "rollout_steps", 1)
        """Global samples of an iteration. Set it in `collect` if it varies."""
        self._shared: StateDict = {}
        self._by_lane: StateDict = {}
        with seeded_init(self.lanes.shared_stream(f"{self.stream_prefix}.init")):  # the same weights on every process
            self.setup()
        # Find optimizers once: updates read their counts.
        self._all_optimizers = [part for part in self._parts("shared_state").values() if hasattr(part, "updates")]

    @property
    def stream_prefix(self) -> str:
        """First part of the names of this algorithm's random streams."""
        return type(self).__name__.lower()

    @property
    def updates(self) -> int:
        """Optimizer steps so far: those of the optimizer that took the most."""
        return max((int(optimizer.updates) for optimizer in self._all_optimizers), default=0)

    def setup(self) -> None:
        """Create networks, optimizers and buffers as attributes. Weights are initialized from the run's seed."""
        raise NotImplementedError(f"{type(self).__name__} must implement setup().")

    def collect(self, clock: TrainState) -> Metrics:
        """Collect the data of one iteration.

        Args:
            clock: Samples, iteration and progress of the run. The loop advances it after `update`.

        Returns:
            Metrics, logged as `rollout/NAME`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement collect().")

    def update(self, clock: TrainState) -> Metrics:
        """Learn from the collected data.

        Args:
            clock: The same clock as in `collect`.

        Returns:
            Metrics, logged as `train/NAME`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement update().")

    def policy(self) -> Policy:
        """Return the policy that is evaluated, played and exported."""
        raise NotImplementedError(f"{type(self).__name__} must implement policy().")

    def register_state(self, name: str, tensor: Tensor) -> Tensor:
        """Save a tensor that is equal on all processes, and return it. Change it in place only."""
        self._shared[name] = tensor
        return tensor

    def register_lane_state(self, name: str, tensor: Tensor) -> Tensor:
        """Save a tensor [B, ...], each row with the lane that owns it, and return it. Change it in place only."""
        self._by_lane[name] = tensor
        return tensor

    def sample_buffers(self) -> Tree:
        """Return the buffers of collected samples, which `plan` measures."""
        parts = {name: part for name, part in vars(self).items() if not isinstance(part, nn.Module)}
        return {name: part.buffers for name, part in parts.items() if isinstance(getattr(part, "buffers", None), dict)}

    # -- state ---------------------------------------------------------------------------------------------------------

    def model_state_dict(self) -> StateDict:
        """Return the parameters and buffers of all modules: what `--init-from` loads."""
        modules = {name: part for name, part in vars(self).items() if isinstance(part, nn.Module)}
        return {f"{name}.{key}": x for name, m in modules.items() for key, x in m.state_dict(keep_vars=True).items()}

    def shared_state(self) -> StateDict:
        """Return the state that all lanes share: modules, optimizers and registered tensors."""
        parts = self._parts("shared_state")
        part_states = {f"{name}.{key}": x for name, part in parts.items() for key, x in part.shared_state().items()}
        return self.model_state_dict() | part_states | self._shared

    def load_shared_state(self, state: StateDict) -> None:
        """Load the tensors of `shared_state`."""
        load_into(self.shared_state(), state, "the agent")

    def lane_state(self, lane: int) -> LaneState:
        """Return the state of one lane: collectors, replay, episode statistics and registered rows."""
        parts = self._parts("lane_state")
        part_states = {f"{name}.{key}": x for name, part in parts.items() for key, x in part.lane_state(lane).items()}
        return {**self._lane_rows(lane), **part_states}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        """Load the state of one lane."""
        parts = self._parts("lane_state")
        prefixes = tuple(f"{name}." for name in parts)
        rest = {key: x for key, x in state.items() if not key.startswith(prefixes)}
        load_into(self._lane_rows(lane), rest, f"lane {lane}")
        for name, part in parts.items():
            part_state = {key.removeprefix(f"{name}."): x for key, x in state.items() if key.startswith(f"{name}.")}
            part.load_lane_state(lane, part_state)

    def _lane_rows(self, lane: int) -> StateDict:
        rows = self.lanes.lane_slice(lane, self.envs_per_lane)
        return {name: tensor[rows] for name, tensor in self._by_lane.items()}

    def _parts(self, method: str) -> dict[str, Any]:
        """Return the attributes that have a method, by name. The task has a state of its own."""
        return {name: part for name, part in vars(self).items() if part is not self.task and hasattr(part, method)}
