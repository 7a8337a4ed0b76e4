"""The nouns: what the loop asks of an algorithm and of a task, and what they hand to each other.

Shapes: L local lanes, E environments a lane, B = L x E local environments in global order.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.pytree import Tree

StateDict: TypeAlias = dict[str, Tensor]
"""Named tensors: everything that is saved, compared and hashed has this form."""


class AppendOnlyTensor(NamedTuple):
    """A tensor that grows by rows, which never change, and forgets its oldest: what a lane keeps for replay.

    It is handed out in this form so that a save need not copy it: rows that an earlier save has written are linked.
    Whoever loads it gets a tensor of all its rows. All rows of a run are counted alike: lanes grow in step.
    """

    first: int
    """Number of the oldest row that is still there, counted from the beginning of the run."""
    stop: int
    """How many rows there have been: the number of the next one."""
    read: Callable[[int, int], Tensor]
    """A copy of the rows from one number up to another, [rows, ...]."""
    capacity: int | None = None
    """How many rows there can be. A checkpoint that has more is refused before it is read into memory."""

    def all(self) -> Tensor:
        return self.read(self.first, self.stop)


LaneState: TypeAlias = Mapping[str, "Tensor | AppendOnlyTensor"]
"""What a lane owns; load_lane_state gets it as a State."""


class Step(NamedTuple):
    """What happened when every environment took one step. Tensors are valid until the next step."""

    obs: Tree
    """[B, ...] The next observation; after an episode's end, the first one of the next episode."""
    reward: Tensor
    """[B] float32."""
    terminated: Tensor
    """[B] bool: the episode ended for good, nothing follows."""
    truncated: Tensor
    """[B] bool: the episode was cut off; its value goes on from `final_obs`."""
    final_obs: Tree
    """[B, ...] The last observation of the episodes that ended here; other rows mean nothing."""
    episode_info: dict[str, Tensor]
    """[B] each: what the task counts over an episode (apples, won); meaningful in rows that ended.

    NaN in a row that does not count it: an environment of another task.
    """
    any_truncated: bool = True
    """Whether any was truncated, known without asking a device; True where the task does not say."""
    agent_reward: Tensor | None = None
    """[B, A] float32: what each agent of a team learns from; none where an environment has one agent."""


class SubtaskSpec(NamedTuple):
    """One of the tasks that a `VecEnv` plays; those that are called by name have them as its `parts`."""

    name: str
    actions: int
    """Features of its actions; an action may have more, for other tasks."""
    length: int
    """Steps of an episode."""


class Checkpointable(Protocol):
    """Something that is saved with the run: a part all lanes share and a part each lane owns."""

    def shared_state(self) -> StateDict: ...
    def load_shared_state(self, state: StateDict) -> None: ...
    def lane_state(self, lane: int) -> LaneState: ...
    def load_lane_state(self, lane: int, state: StateDict) -> None: ...


class Renderable(Protocol):
    """One moment to watch, as characters and as a picture, uint8 [height, width, 3]; valid until the next one."""

    def render_text(self) -> str: ...
    def render(self) -> np.ndarray: ...


class VecEnv(Checkpointable, Protocol):
    """The environments of the local lanes, stepped together."""

    num_envs: int
    """B: how many environments live here."""
    observation_space: Space[Any]
    """Of one environment."""
    action_space: Space[Any]
    """Of one environment."""

    def reset(self) -> Tree:
        """Start the first episode of every environment; [B, ...] observations."""

    def observations(self) -> Tree:
        """The current observations, [B, ...]; what the last reset, step or restore left."""

    def step(self, action: Tensor) -> Step:
        """Take one action in every environment; an environment that ends starts its next episode at once."""

    def on_iteration_start(self, clock: TrainState) -> None:
        """Once an iteration: the only way a task learns of time or results."""

    def render_text(self, env: int) -> str:
        """One environment as characters, for the terminal."""

    def render(self, env: int) -> np.ndarray:
        """One environment as a picture, uint8 [height, width, 3]."""

    def close(self) -> None: ...

    def lane_state(self, lane: int) -> StateDict:
        """Tensors and no more: what grows is an algorithm's."""


Split: TypeAlias = Literal["train", "validation", "test"]


class Dataset(Checkpointable, Protocol):
    """Examples to learn from: a task that is read, not played. Every process sees all of it; lanes share each batch."""

    config: Any
    """The settings it was built from: a process that reads ahead builds it again."""
    target_type: Literal["regression", "classification"]
    """What is to be predicted: a number, or how likely the label 1 is."""
    vocabularies: Mapping[str, int]
    """How many names there are for what the examples name by number."""
    target_mean_std: tuple[float, float]
    """Mean and deviation of the training targets; 0 and 1 for labels."""

    def count(self, split: Split) -> int:
        """How many examples a split has."""

    def read(self, split: Split, rows: np.ndarray) -> "dict[str, Tree]":
        """Examples by their numbers within the split: `inputs`, a tree [N, ...], and `target`, [N] float32."""

    def compute_metrics(self, split: Split, predictions: np.ndarray) -> dict[str, float]:
        """What predictions for a whole split, in its order, come to; `score` should grow, `mae/death` is of a part."""

    def plot(self, split: Split, predictions: np.ndarray, directory: Path) -> list[Path]:
        """Pictures of the predictions for a whole split; the files."""

    def playback(self, split: Split, number: int, predict: Callable[[np.ndarray], np.ndarray]) -> Iterator[Renderable]:
        """One of a split's stories to watch, the best of them first; `predict` takes numbers of examples."""

    def on_iteration_start(self, clock: TrainState) -> None: ...
    def close(self) -> None: ...


class BenchmarkOp(NamedTuple):
    """Bare work that an iteration cannot do without, for `bench`: one call, with nothing around it."""

    kind: str
    """env, inference or learning."""
    samples: int
    """Local samples of one call."""
    calls_per_iteration: int
    """Calls in an iteration."""
    run: Callable[[], object]
    batch_divisor: int = 1
    """How many times smaller the batch is than an iteration's own."""


class Policy(Protocol):
    """A network ready to act: no exploration, no training state."""

    def initial_state(self, count: int) -> Tree:
        """The memory of `count` episodes about to start; an empty dict where the policy has none."""

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        """Actions for a batch of observations, and the memory after them."""

    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        """The same, with the network's outputs that the actions were made of: what an export hands out, too."""


class Algorithm(Checkpointable, Protocol):
    """One agent learning on one task."""

    samples: int
    """Global samples the last iteration took."""
    updates: int
    """Optimizer steps so far."""

    def collect(self, clock: TrainState) -> Metrics: ...
    def update(self, clock: TrainState) -> Metrics: ...
    def policy(self) -> Policy: ...
    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """The bare work of an iteration like the last one, on batches `fewer` times smaller than its own."""

    def sample_buffers(self) -> Tree:
        """What an iteration's local samples lie in, so that a plan can say how much memory they take."""

    def model_state_dict(self) -> StateDict:
        """The part of the shared state that makes the agent what it is: what a new run may start from."""


class DatasetConfig(Protocol):
    """Settings of a data set; `build` makes it."""

    def build(self, lanes: Lanes, device: torch.device) -> Dataset: ...


@runtime_checkable
class TaskConfig(Protocol):
    """Settings of a task that is played; `build` makes it for the lanes hosted here."""

    @property
    def num_envs(self) -> int:
        """Environments of the whole run."""

    def build(self, lanes: Lanes, device: torch.device) -> VecEnv: ...


class AlgoConfig(Protocol):
    """Settings of an algorithm; `check` refuses impossible numbers before any process starts."""

    def validate(self, task: Any, run: RunConfig) -> None: ...
    def samples_per_iteration(self, task: Any) -> int:
        """Global samples of one iteration."""

    def build(self, task: Any, runtime: Any) -> Algorithm: ...


class Loss(NamedTuple):
    """What a loss function returns: sums over samples, never means, because lanes may hold different counts."""

    loss_sum: Tensor
    """The sum to differentiate."""
    num_samples: Tensor | int
    """How many samples it is over."""
    metric_sums: Mapping[str, Tensor] = {}
    """Other sums over the same samples, for the log."""


LossFunction: TypeAlias = Callable[[Any], Loss]
