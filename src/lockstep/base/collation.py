"""Default collation: examples of a map-style data set become batches of tensors.

Shapes: N examples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.config import ConfigError
from lockstep.protocols import TargetType
from lockstep.pytree import Tree, tree_map


def collate_pairs(examples: Sequence[Any]) -> tuple[Tree, Tree]:
    """Stack examples (input, target), or (input, input, ..., target), to inputs and targets [N, ...].

    Several inputs become a dict with the names input0, input1, ... float64 becomes float32.

    Raises:
        ConfigError: The examples are no such tuples, or cannot be stacked.
    """
    first = examples[0]
    if hasattr(first, "edge_index") or hasattr(first, "edge_types"):
        raise ConfigError(
            f"an example of the data set is a graph ({type(first).__name__}).", "Inherit lockstep.GraphDataset."
        )
    if not isinstance(first, tuple | list) or len(first) < 2:
        raise ConfigError(
            f"an example of the data set is {_describe(first)}, not a tuple (input, target).",
            "Return a tuple from __getitem__, or implement collate() in the Dataset.",
        )
    try:
        *inputs, target = default_collate([tuple(example) for example in examples])
    except (TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"examples of the data set cannot be stacked to a batch: {reason}.",
            "Return tensors, arrays or numbers of equal shapes, or implement collate() in the Dataset.",
        ) from None
    named = inputs[0] if len(inputs) == 1 else {f"input{index}": part for index, part in enumerate(inputs)}
    return _as_tree(named), _as_tree(target)


def cast_target(target: Tree, target_type: TargetType) -> Tree:
    """Convert targets to the dtype of their type: int64 for classes, float32 otherwise."""
    cast: Tree = tree_map(lambda x: x.long() if target_type == "multiclass" else x.float(), target)
    return cast


def _as_tree(batch: Any) -> Tree:
    if isinstance(batch, Mapping):
        return {str(name): _as_tree(part) for name, part in batch.items()}
    if isinstance(batch, Tensor):
        return batch.float() if batch.dtype == torch.float64 else batch
    raise ConfigError(
        f"a part of an example is {_describe(batch)}, which is neither a tensor nor a dict of tensors.",
        "Return tensors, arrays or numbers from __getitem__, or implement collate() in the Dataset.",
    )


def _describe(value: Any) -> str:
    count = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{count}"
