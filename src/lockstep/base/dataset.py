"""Base class of data sets."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from lockstep.base.config_binding import Configurable
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import Renderable, Split, StateDict
from lockstep.pytree import Tree, load_into


class Dataset(Configurable):
    """Base class of data sets for supervised training. Every process can read all examples; lanes share each batch."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of a data set."""

        owner: ClassVar[Any] = None

        def build(self, lanes: Lanes, device: torch.device) -> Any:
            """Build the data set. Loader workers build it again from the same settings."""
            return self.owner(self)

    target_type: Literal["regression", "classification"] = "regression"
    """Type of the target: a number, or the label 0 or 1, whose probability is predicted."""
    vocabularies: Mapping[str, int] = {}
    """Number of distinct values of each categorical input."""
    target_mean_std: tuple[float, float] = (0.0, 1.0)
    """Mean and standard deviation of the training targets; 0 and 1 for labels."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.setup()

    def setup(self) -> None:
        """Open the data and set the attributes that describe it. Called once, also in each loader worker."""

    def count(self, split: Split) -> int:
        """Return the number of examples of a split: train, validation or test."""
        raise NotImplementedError(f"{type(self).__name__} must implement count().")

    def read(self, split: Split, rows: np.ndarray) -> dict[str, Tree]:
        """Return examples of a split.

        Args:
            split: train, validation or test.
            rows: Indices [N] of the examples in the split.

        Returns:
            `inputs`, a tree of tensors [N, ...], and `target`, [N] float32.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement read().")

    def compute_metrics(self, split: Split, predictions: np.ndarray) -> dict[str, float]:
        """Return metrics of the predictions for a whole split.

        Args:
            split: train, validation or test.
            predictions: Predictions [N] in the order of the split.

        Returns:
            Metrics by name. The best checkpoint is the one with the highest `score`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement compute_metrics().")

    def plot(self, split: Split, predictions: np.ndarray, directory: Path) -> list[Path]:
        """Write plots of the predictions for a whole split and return their paths."""
        return []

    def playback(self, split: Split, number: int, predict: Callable[[np.ndarray], np.ndarray]) -> Iterator[Renderable]:
        """Iterate over frames of one example sequence, the best one first. `predict` takes row numbers."""
        raise ConfigError(f"{type(self).__name__} has nothing to play back.", "Implement playback().")

    def on_iteration_start(self, clock: TrainState) -> None:
        """Read the clock. Called once per iteration."""

    def close(self) -> None:
        """Release resources."""

    def shared_state(self) -> StateDict:
        """Return tensors that are equal on all processes."""
        return {}

    def load_shared_state(self, state: StateDict) -> None:
        """Load the tensors of `shared_state`."""
        load_into(self.shared_state(), state, type(self).__name__)

    def lane_state(self, lane: int) -> StateDict:
        """Return the state of one lane. It is empty: the position in the data is a function of the clock."""
        return {}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        """Load the state of one lane."""
        load_into({}, state, f"{type(self).__name__}, lane {lane}")
