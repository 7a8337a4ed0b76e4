"""Trees: a tensor, or a nested dict of tensors. Observations, batches and recurrent states are trees."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = "Tensor | dict[str, Tree]"


def tree_map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to every tensor of a tree, with the corresponding tensors of further trees."""
    if isinstance(tree, dict):
        return {name: tree_map(function, tree[name], *(other[name] for other in rest)) for name in tree}
    return function(tree, *rest)


def tree_where(mask: Tensor, chosen: Any, other: Any) -> Any:
    """Select rows of one tree where the mask is true and of the other elsewhere. The mask has their leading axes."""

    def pick(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim())), x, y)

    return tree_map(pick, chosen, other)


def named_leaves(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a tree by dotted name, in the order of the tree."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Tensor] = {}
    for name, branch in tree.items():
        flat |= named_leaves(branch, f"{prefix}.{name}" if prefix else name)
    return flat


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, in the order of the tree."""
    return [leaf for branch in tree.values() for leaf in leaves(branch)] if isinstance(tree, dict) else [tree]


def first_leaf(tree: Tree) -> Tensor:
    """Return the first tensor of a tree. All tensors of a tree have the same leading axes."""
    while isinstance(tree, dict):
        tree = next(iter(tree.values()))
    return tree


def load_into(live: Mapping[str, Tensor], saved: Mapping[str, Tensor], owner: str) -> None:
    """Copy saved tensors into live ones of the same names. Keep the storage and strides of the live ones."""
    missing, unknown = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    if missing or unknown:
        raise ValueError(
            f"the saved state of {owner} does not match this configuration: "
            f"missing {missing[:3] or 'nothing'}, unexpected {unknown[:3] or 'nothing'}.\n"
            "Resume a run with the configuration it was started with."
        )
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise ValueError(
                f"{owner}: {name} was saved as {saved[name].dtype} {tuple(saved[name].shape)} "
                f"and is {tensor.dtype} {tuple(tensor.shape)} here.\n"
                "Resume a run with the configuration it was started with."
            )
        tensor.detach().copy_(saved[name])
