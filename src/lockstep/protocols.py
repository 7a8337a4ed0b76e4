"""Types that tasks, algorithms and the training loop exchange. The base classes of user code are in `base`.

Shapes: B local environments in lane order.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.pytree import Tree

StateDict: TypeAlias = dict[str, Tensor]
"""Named tensors. Everything that is saved, compared or hashed has this form."""

Split: TypeAlias = Literal["train", "validation", "test"]

TargetType: TypeAlias = Literal["regression", "binary", "multiclass"]
"""Numbers, labels 0 and 1, or class numbers from 0."""


class AppendOnlyTensor(NamedTuple):
    """A tensor that grows by immutable rows and drops its oldest ones, such as a lane's replay buffer.

    A save does not copy it: rows that an earlier checkpoint holds are linked. Loading returns one tensor of all rows.
    All lanes of a run have the same number of rows.
    """

    first: int
    """Index of the oldest row kept, counted from the start of the run."""
    stop: int
    """Index of the next row."""
    read: Callable[[int, int], Tensor]
    """Return a copy of the rows between two indices, [rows, ...]."""
    capacity: int | None = None
    """Maximum number of rows. A checkpoint with more is rejected before it is read into memory."""

    def all(self) -> Tensor:
        return self.read(self.first, self.stop)


LaneState: TypeAlias = Mapping[str, "Tensor | AppendOnlyTensor"]
"""State owned by one lane. `load_lane_state` receives it as a StateDict."""


class Step(NamedTuple):
    """Result of one step of every environment. Tensors are valid until the next step."""

    obs: Tree
    """[B, ...] Next observations. After the end of an episode: the first observation of the next episode."""
    reward: Tensor
    """[B] float32."""
    terminated: Tensor
    """[B] bool: the episode ended in a terminal state."""
    truncated: Tensor
    """[B] bool: the episode was cut off. Its value is bootstrapped from `final_obs`."""
    final_obs: Tree
    """[B, ...] Last observations of the episodes that ended in this step; other rows are undefined."""
    episode_info: dict[str, Tensor]
    """[B] each: episode metrics of the task (apples, won), read in rows whose episode ended.

    NaN means that the environment does not report this metric, for example because it plays another task.
    """
    any_truncated: bool = True
    """Whether any row is truncated, if the task knows it without a device synchronization; otherwise True."""
    agent_reward: Tensor | None = None
    """[B, A] float32: reward of each agent of a team. None for single agents."""
    active: Tensor | None = None
    """[B] bool: whether the agent of a row took part. Other rows have reward 0 and `terminated`. None: all did."""


class SubtaskSpec(NamedTuple):
    """One task of a multi-task `VecEnv`."""

    name: str
    actions: int
    """Number of action features of this task. The action space may have more."""
    length: int
    """Steps per episode."""


class Loss(NamedTuple):
    """Result of a loss function: sums over samples, not means, because lanes may hold different counts."""

    loss_sum: Tensor
    """Sum to differentiate."""
    num_samples: Tensor | int
    """Number of samples in the sum."""
    metric_sums: Mapping[str, Tensor] = {}
    """Sums over the same samples, for the log."""


LossFunction: TypeAlias = Callable[[Any], Loss]


class Policy(Protocol):
    """A network ready to act, without exploration or training state. A subclass inherits all but `forward`."""

    def initial_state(self, count: int) -> Tree:
        """Return the recurrent state at the start of `count` episodes; an empty dict for a feed-forward policy."""
        return {}

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        """Return actions for a batch of observations, and the next recurrent state."""
        action, _, next_memory = self.forward(obs, memory)
        return action, next_memory

    def sample(self, obs: Tree, memory: Tree, seed: int, counter: int) -> tuple[Tensor, Tree]:
        """Return actions with the exploration of training, and the next recurrent state.

        Random numbers are a function of the seed and the counter, which is the number of earlier calls.
        """
        raise ConfigError(
            f"{type(self).__name__} has no exploration.", "Call act(obs), or implement sample() in the policy."
        )

    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Return actions, the network outputs they were computed from, and the next recurrent state."""


@runtime_checkable
class TaskConfig(Protocol):
    """Settings of environments. Data sets have no `num_envs`."""

    @property
    def num_envs(self) -> int:
        """Number of environments, over all processes."""

    def build(self, lanes: Lanes, device: torch.device) -> Any: ...


class Renderable(Protocol):
    """One frame, as characters and as an image, uint8 [height, width, 3]. Valid until the next frame."""

    def render_text(self) -> str: ...
    def render(self) -> np.ndarray: ...


class BenchmarkOp(NamedTuple):
    """One operation that every iteration needs, without the code around it. `bench` compares a run with it."""

    kind: str
    """env, inference or learning."""
    samples: int
    """Local samples per call."""
    calls_per_iteration: int
    run: Callable[[], object]
    batch_divisor: int = 1
    """Factor by which the batch is smaller than an iteration's own."""


@runtime_checkable
class Benchmarkable(Protocol):
    """An algorithm whose speed `bench`, `plan` and `autoscale` can compare with its bare operations. Optional."""

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """Return the bare operations of an iteration, with batches `fewer` times smaller than its own."""
