"""Non-finite values in a rollout: detected by one cheap check, then located by lane, environment and step.

Shapes: T horizon, L local lanes, B local environments, lane after lane.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.metrics import widen
from lockstep.pytree import Tree, leaves, named_leaves

_MAX_SHOWN = 4


def value_range(tree: Tree) -> Tensor:
    """Return the sum of max - min over the floating-point leaves of a tree, a double; non-finite if any value is."""
    # One pass without a copy, 10 to 20 times faster than a norm or `isfinite`.
    ends = [x.aminmax() for x in leaves(tree) if x.is_floating_point()]
    return torch.stack([widen(high) - widen(low) for low, high in ends]).sum() if ends else torch.zeros(())


def locate_nonfinite(named: Any, lanes: range) -> list[str]:
    """Describe non-finite values of tensors [T, B, ...]: the first one per environment and tensor, sorted by step."""
    found = []
    for name, x in named_leaves(named).items():
        nonfinite = ~x.isfinite().reshape(*x.shape[:2], -1)  # [T, B, values of one observation]
        for row in nonfinite.any(2).any(0).nonzero().flatten().tolist():
            step, number = nonfinite[:, row].nonzero()[0].tolist()
            lane, env = divmod(row, x.shape[1] // len(lanes))
            source = f"lane {lanes[lane]}, environment {env} of the lane, step {step} of the rollout: {name}"
            index = [int(i) for i in torch.unravel_index(torch.tensor(number), x.shape[2:])]
            found.append((step, f"{source}{index or ''} is {x[step, row].flatten()[number].item()}"))
    ordered = [message for _, message in sorted(found, key=lambda entry: entry[0])]
    overflow = f"lanes {lanes.start} to {lanes.stop - 1}: {len(ordered) - _MAX_SHOWN} more places"
    return [*ordered[:_MAX_SHOWN], *([overflow] if len(ordered) > _MAX_SHOWN else [])]
