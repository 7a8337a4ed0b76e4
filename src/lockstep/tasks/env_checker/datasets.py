"""Checks of data sets."""

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from lockstep.lanes import Lanes
from lockstep.protocols import Split, StateDict, TargetType
from lockstep.pytree import Tree, named_leaves, tree_map
from lockstep.rng import RandomStream

ROWS = 64
"""Number of examples that are read from each split."""
MEMBERS = ("config", "target_type", "output_shape", "count", "read", "loss", "predictions", "compute_metrics")


def check_dataset(config: Any) -> Iterator[str]:
    """Yield a message for every violation of the data set contract."""
    data = _build(config)
    missing = [name for name in MEMBERS if not hasattr(type(data), name) and not hasattr(data, name)]
    if missing:
        yield f"The data set has no {', '.join(missing)}. Inherit lockstep.Dataset and add them."
        return
    faults = [fault for split in get_args(Split) for fault in _check_split(data, split)]
    yield from faults
    if not faults:  # examples of the wrong shape cannot be compared
        yield from _check_reads(data, _build(config))
        yield from _check_loss(data)
        yield from _check_metrics(data)
        yield from _check_state(data, _build(config))
    data.close()


def _build(config: Any) -> Any:
    return config.build(Lanes(8, range(8), 0), torch.device("cpu"))


def _rows(data: Any, split: Split) -> np.ndarray:
    """Return some rows of a split in random order."""
    count = min(ROWS, data.count(split))
    return RandomStream(0, "check").permutation(0, data.count(split)).numpy()[:count]


def _leaves(examples: dict[str, Tree]) -> StateDict:
    return named_leaves({name: examples[name] for name in ("inputs", "target")})


def _check_split(data: Any, split: Split) -> Iterator[str]:
    """Check count, names, shapes and values of one split."""
    count = data.count(split)
    if not isinstance(count, int) or count < 1:
        yield f"count('{split}') is {count!r}. Return the number of its examples, at least 1."
        return
    rows = _rows(data, split)
    examples = data.read(split, rows)
    if not {"inputs", "target"} <= examples.keys():
        yield f"read('{split}', rows) returns {', '.join(examples)}. Return a dict with `inputs` and `target`."
        return
    for name, values in _leaves(examples).items():
        if not isinstance(values, Tensor) or len(values) != len(rows):
            actual = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            yield f"{name} of {len(rows)} rows of '{split}' is {actual}. Return a tensor with one row per example."
        elif values.is_floating_point() and not values.isfinite().all():
            yield f"{name} of '{split}' has values that are not finite. Remove or replace them when you read the data."
    yield from _check_target(data, split, examples["target"])


def _check_target(data: Any, split: Split, target: Any) -> Iterator[str]:
    """Check dtype and values of targets. A dict of targets is for a loss of the user's own."""
    if data.target_type not in get_args(TargetType):
        yield f"target_type is {data.target_type!r}. Set it to one of {', '.join(get_args(TargetType))}."
    elif isinstance(target, Tensor):
        dtype = torch.int64 if data.target_type == "multiclass" else torch.float32
        if target.dtype != dtype:
            yield f"target of '{split}' is {target.dtype} {list(target.shape)}. Return {str(dtype)[6:]} [N, ...]."
        elif data.target_type == "binary" and not ((target == 0) | (target == 1)).all():
            yield (
                f"target of '{split}' has labels other than 0 and 1. Return labels, or set target_type to 'multiclass' "
                "or 'regression'."
            )
        elif data.target_type == "multiclass" and not ((target >= 0) & (target < data.num_classes)).all():
            yield (
                f"target of '{split}' has classes from {int(target.min())} to {int(target.max())}, but num_classes is "
                f"{data.num_classes}. Number the classes from 0, and set num_classes in setup()."
            )


def _check_reads(data: Any, rebuilt: Any) -> Iterator[str]:
    """Check that an example depends on its row alone: not on the batch, the order, or the process that reads it."""
    rows = _rows(data, "train")
    expected = _leaves(data.read("train", rows))
    for case, other in {
        "read again": _leaves(data.read("train", rows)),
        "read by another process": _leaves(rebuilt.read("train", rows)),
        "read in another order": {k: x.flip(0) for k, x in _leaves(data.read("train", rows[::-1].copy())).items()},
    }.items():
        changed = [key for key, x in expected.items() if not torch.equal(x, other[key])]
        if changed:
            yield f"{', '.join(changed)} of the same rows differ when {case}. Let an example depend on its row alone."
    single = _leaves(data.read("train", rows[:1]))
    changed = [
        key for key, x in expected.items() if x.shape[1:] == single[key].shape[1:] and not x[0].equal(single[key][0])
    ]
    if changed:
        yield f"{', '.join(changed)} of row {rows[0]} depends on the other rows of its batch. Compute rows separately."


def _check_loss(data: Any) -> Iterator[str]:
    """Check that the loss is a sum over examples, and that examples of weight 0 do not count."""
    rows = _rows(data, "train")
    if len(rows) < 3:
        return
    target = data.read("train", rows)["target"]
    outputs = RandomStream(0, "check.outputs").normal(0, len(rows), *data.output_shape)

    def loss_of(rows: slice, weights: Tensor) -> tuple[float, float]:
        part = tree_map(lambda x: x[rows], target)
        loss = data.loss(outputs[rows], part, weights)
        return float(loss.loss_sum), float(loss.num_samples)

    third = len(rows) // 3
    whole, ones = loss_of(slice(None), torch.ones(len(rows))), torch.ones(third)
    first, rest = loss_of(slice(0, third), ones), loss_of(slice(third, None), torch.ones(len(rows) - third))
    sums = [a + b for a, b in zip(first, rest, strict=True)]
    if not np.allclose(whole, sums, rtol=1e-3):
        yield (
            f"loss() of {len(rows)} examples is {whole[0]:.6g} of {whole[1]:g}, but that of its parts adds up to "
            f"{sums[0]:.6g} of {sums[1]:g}. Return the sum over examples and their number, not a mean."
        )
    weights = torch.zeros(len(rows))
    weights[:third] = 1.0
    if not np.allclose(loss_of(slice(None), weights), first, rtol=1e-3):
        yield "loss() counts examples of weight 0, which are padding. Multiply losses and counts by the weight."


def _check_metrics(data: Any) -> Iterator[str]:
    metrics = data.compute_metrics("validation", _predictions(data, "validation"))
    if "score" not in metrics:
        yield f"compute_metrics returns {', '.join(metrics) or 'nothing'}. Add `score`: higher is better."
    not_floats = [name for name, value in metrics.items() if not isinstance(value, float)]
    if not_floats:
        yield f"compute_metrics returns {', '.join(not_floats)} that are not Python floats. Convert them with float()."


def _predictions(data: Any, split: Split) -> np.ndarray:
    """Return predictions of the shape that the network's would have, in the order of the split."""
    outputs = RandomStream(0, "check.predictions").normal(0, data.count(split), *data.output_shape)
    predictions: np.ndarray = data.predictions(outputs).double().numpy()
    return predictions


def _check_state(data: Any, rebuilt: Any) -> Iterator[str]:
    saved = {name: x.clone() for name, x in data.shared_state().items()}
    rebuilt.load_shared_state(saved)
    lost = [name for name, x in rebuilt.shared_state().items() if not torch.equal(x, saved[name])]
    if lost:
        yield f"{', '.join(lost)} of shared_state() differ after load_shared_state(). Load all state that is saved."
