"""Base class of data sets.

Shapes: N examples, C classes; `...` are the axes of one target.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lockstep.base.collation import cast_target, collate_pairs
from lockstep.base.config_binding import Configurable
from lockstep.base.prediction_plots import plot_predictions
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.ops import prediction_losses, prediction_metrics
from lockstep.protocols import Loss, Renderable, Split, StateDict, TargetType
from lockstep.pytree import Tree, load_into

READ_ROWS = 1024
"""Examples per read of all targets of a split."""


def has_playback(task_config: Any) -> bool:
    """Return whether a task can be watched: environments can, and data sets that implement `playback`."""
    owner = getattr(task_config, "owner", None)
    return not (isinstance(owner, type) and issubclass(owner, Dataset) and owner.playback is Dataset.playback)


class Dataset(Configurable):
    """Base class of data sets for supervised training. Every process can read all examples; lanes share each batch.

    `setup` opens the data. If it sets `splits` to map-style data sets of torch, with examples (input, target), then all
    methods have a default. Otherwise, implement `count` and `read`.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of a data set."""

        owner: ClassVar[Any] = None

        def build(self, lanes: Lanes, device: torch.device) -> Any:
            """Build the data set. Loader workers build it again from the same settings."""
            return self.owner(self)

    splits: Mapping[Split, Any] = {}
    """Map-style data sets of the splits train, validation and test. Their examples are tuples (input, target)."""
    target_type: TargetType = "regression"
    """Type of the target: numbers (regression), labels 0 and 1 (binary), or class numbers from 0 (multiclass)."""
    num_classes: int = 0
    """Number of classes of a multiclass target."""
    target_names: Sequence[str] = ()
    """Names of the classes, or of the outputs of a target with several. Empty: their numbers."""
    target_mean_std: tuple[Any, Any] = (0.0, 1.0)
    """Mean and standard deviation of the training targets, numbers or one for each output; 0 and 1 for labels. The
    network learns standardized targets."""
    ragged: bool = False
    """Whether the second axis of inputs has another length in every batch. Exports then take any length."""
    vocabularies: Mapping[str, int] = {}
    """Number of distinct values of each categorical input."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.lock = threading.RLock()
        """Held while examples are read: the loader's thread and an evaluation may read at the same time."""
        self._targets: dict[Split, np.ndarray] = {}
        self._scales: dict[torch.device, tuple[Any, Any]] = {}
        self.setup()

    def setup(self) -> None:
        """Open the data and set the attributes that describe it. Called once, also in each loader worker."""

    # -- examples ------------------------------------------------------------------------------------------------------

    def count(self, split: Split) -> int:
        """Return the number of examples of a split: train, validation or test."""
        return len(self._split(split))

    def read(self, split: Split, rows: np.ndarray) -> dict[str, Tree]:
        """Return examples of a split.

        Args:
            split: train, validation or test.
            rows: Indices [N] of the examples in the split.

        Returns:
            `inputs`, a tree of tensors [N, ...], and `target`, [N, ...]: float32, or int64 for classes.
        """
        data, indices = self._split(split), rows.tolist()
        batched = hasattr(data, "__getitems__")  # as torch's own loader does
        inputs, target = self.collate(data.__getitems__(indices) if batched else [data[index] for index in indices])
        return {"inputs": inputs, "target": cast_target(target, self.target_type)}

    def collate(self, examples: Sequence[Any]) -> tuple[Tree, Tree]:
        """Combine examples of a map-style data set to inputs [N, ...] and targets [N, ...].

        Args:
            examples: Tuples (input, target), or (input, input, ..., target).

        Returns:
            Trees of tensors. Several inputs are a dict with the names input0, input1, ...
        """
        return collate_pairs(examples)

    def targets(self, split: Split) -> np.ndarray:
        """Return all targets of a split, [N, ...]. They are read once."""
        if split not in self._targets:
            rows = np.arange(self.count(split))
            parts = [self.read(split, rows[i : i + READ_ROWS])["target"] for i in range(0, len(rows), READ_ROWS)]
            self._targets[split] = torch.cat(parts).numpy()  # type: ignore[arg-type]
        return self._targets[split]

    def _split(self, split: Split) -> Any:
        if split not in self.splits:
            raise ConfigError(
                f"{type(self).__name__} has no {split} split; it has {', '.join(self.splits) or 'none'}.",
                f"Add it to `splits` in setup(), or implement count() and read() of {type(self).__name__}.",
            )
        data = self.splits[split]
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ConfigError(
                f"the {split} split of {type(self).__name__} is a {type(data).__name__}, which is not map-style.",
                "Use a data set with __len__ and __getitem__: a batch is read by the numbers of its examples.",
            )
        return data

    # -- network and loss ----------------------------------------------------------------------------------------------

    def example_inputs(self) -> Tree:
        """Return the inputs of one training example, [1, ...]. Networks read their shapes."""
        return self.read("train", np.zeros(1, dtype=np.int64))["inputs"]

    @cached_property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of the target of one example."""
        target = self.read("train", np.zeros(1, dtype=np.int64))["target"]
        if not isinstance(target, Tensor):
            raise ConfigError(
                f"the target is a dict of {', '.join(target)}.",
                "Set target_shape and output_shape, and implement loss() and compute_metrics().",
            )
        return tuple(target.shape[1:])

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the network's output for one example: that of the target; with classes, [C, ...] logits.

        Set it in `setup` if a loss of your own needs another shape.
        """
        if self.target_type != "multiclass":
            return self.target_shape
        if self.num_classes < 2:
            raise ConfigError(
                f"num_classes is {self.num_classes}, but the target is multiclass.", "Set self.num_classes in setup()."
            )
        return (self.num_classes, *self.target_shape)

    @property
    def num_outputs(self) -> int:
        """Number of values in the network's output for one example."""
        return math.prod(self.output_shape)

    def network_input(self, inputs: Tree) -> Any:
        """Convert a batch of inputs to the argument of the network. By default, they are passed as they are."""
        return inputs

    def loss(self, outputs: Tensor, target: Any, weight: Tensor) -> Loss:
        """Return the loss of a batch as a sum over examples, and their number.

        The default is the cross-entropy of labels and classes, and the squared error of standardized numbers.

        Args:
            outputs: Outputs of the network [N, ...], float32.
            target: Targets [N, ...].
            weight: [N] float32: 1 for examples, and 0 for padding, which must not count.
        """
        if self.target_type == "regression":
            mean, std = self._target_scale(outputs.device)
            losses = prediction_losses.squared_error(outputs, (target - mean) / std)
        elif self.target_type == "binary":
            losses = prediction_losses.binary_cross_entropy(outputs, target)
        else:
            losses = prediction_losses.cross_entropy(outputs, target)
        return Loss((losses * weight).sum(), weight.sum())

    def predictions(self, outputs: Tensor) -> Tensor:
        """Convert outputs of the network [N, ...] to predictions: numbers in the unit of the target, or logits."""
        mean, std = self._target_scale(outputs.device)
        predictions: Tensor = outputs * std + mean
        return predictions

    def _target_scale(self, device: torch.device) -> tuple[Any, Any]:
        """Return the mean and the standard deviation of the target, on a device if they are tensors."""
        if device not in self._scales:
            scale = self.target_mean_std
            parts = tuple(x if isinstance(x, float) else torch.as_tensor(x, dtype=torch.float32) for x in scale)
            self._scales[device] = tuple(x.to(device) if isinstance(x, Tensor) else x for x in parts)  # type: ignore[assignment]
        return self._scales[device]

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def compute_metrics(self, split: Split, predictions: np.ndarray) -> dict[str, float]:
        """Return metrics of the predictions for a whole split.

        Args:
            split: train, validation or test.
            predictions: Predictions [N, ...] in the order of the split.

        Returns:
            Metrics by name. The best checkpoint is the one with the highest `score`: by default, minus the log-loss,
            or minus the MAE, which is divided by the standard deviation of each output if there are several.
        """
        target, names = self.targets(split), self.target_names
        if self.target_type == "multiclass":
            result = prediction_metrics.multiclass_metrics(predictions, target, names)
        elif self.target_type == "binary":
            result = prediction_metrics.mean_metrics(prediction_metrics.binary_metrics, predictions, target, names)
        else:
            result = prediction_metrics.mean_metrics(prediction_metrics.regression_metrics, predictions, target, names)
        score = -result["mae" if self.target_type == "regression" else "log_loss"]
        if self.target_type == "regression" and target.ndim > 1:
            score = -float((np.abs(predictions - target) / np.asarray(self.target_mean_std[1])).mean())
        return {name: value for name, value in result.items() if np.isfinite(value)} | {"score": score}

    def plot(self, split: Split, predictions: np.ndarray, directory: Path) -> list[Path]:
        """Write plots of the predictions for a whole split and return their paths."""
        return plot_predictions(self.target_type, self.targets(split), predictions, self.target_names, directory)

    def playback(self, split: Split, number: int, predict: Callable[[np.ndarray], np.ndarray]) -> Iterator[Renderable]:
        """Iterate over frames of one example sequence, the best one first. `predict` takes row numbers."""
        raise ConfigError(f"{type(self).__name__} has nothing to play back.", "Implement playback().")

    # -- state ---------------------------------------------------------------------------------------------------------

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
