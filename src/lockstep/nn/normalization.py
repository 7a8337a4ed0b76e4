"""Running moments of observations and returns, made of pooled sums, frozen while a rollout is collected.

Shapes: L local lanes, N samples a lane, D features.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.metrics import widen
from lockstep.ops.functional import moments
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, named_leaves
from lockstep.transfer import upload


class RunningMeanStd:
    """Mean and variance of a vector over everything the run has seen."""

    def __init__(self, features: int, device: torch.device) -> None:
        self.sums = widen(torch.zeros(2 * features + 1, device=device))
        """Sums, sums of squares, and the count: what pooling adds up."""

    @staticmethod
    def batch_stats(samples: Tensor) -> Tensor:
        """The sums of samples [L, N, D] for each lane, [L, 2D + 1], lane by lane so that bits do not depend on L."""
        rows = []
        for lane in widen(samples):
            count = lane.new_full((1,), float(len(lane)))
            rows.append(torch.cat([lane.sum(0), lane.square().sum(0), count]))
        return torch.stack(rows)

    def update(self, pooled: Tensor) -> None:
        """Add the pooled table of an iteration, [2D + 1] on the host."""
        self.sums += upload(pooled, self.sums.device)

    def mean_and_std(self, epsilon: float = 1e-8) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, [D] float32; (0, 1) before anything was seen."""
        total, squares = self.sums[:-1].chunk(2)
        mean, variance = moments(total, squares, self.sums[-1])
        seen = self.sums[-1] > 0
        std = torch.where(seen, (variance + epsilon).sqrt(), torch.ones_like(variance))
        return mean.float(), std.float()


def normalize(obs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Observations [N, ...] shifted and scaled by moments [D], clipped to +-10."""
    return ((obs.unsqueeze(-1).flatten(1) - mean) / std).clamp(-10.0, 10.0).view(obs.shape)


class ObservationNormalizer:
    """Shifts and scales the floating-point parts of observations, clipped to +-10; pictures pass as they are."""

    def __init__(self, example: Tree, enabled: bool) -> None:
        """`example` is a batch of observations, [B, ...]."""
        parts = {name: part for name, part in named_leaves(example).items() if enabled and part.is_floating_point()}
        self.moments = {name: RunningMeanStd(part[0].numel(), part.device) for name, part in parts.items()}
        self._frozen: dict[str, tuple[Tensor, Tensor]] = {}
        self.freeze()

    def __call__(self, obs: Tree) -> Tree:
        """Normalise observations [N, ...] with the frozen moments."""
        return _map_named(self._normalize, obs) if self.moments else obs

    def _normalize(self, name: str, obs: Tensor) -> Tensor:
        if name not in self._frozen:
            return obs
        return normalize(obs, *self._frozen[name])

    def batch_stats(self, obs: Tree) -> Tensor:
        """What this process saw, observations [L, N, ...] as one table [L, K] to be pooled."""
        parts = named_leaves(obs)
        return torch.cat(
            [RunningMeanStd.batch_stats(parts[name].unsqueeze(-1).flatten(2)) for name in self.moments], dim=1
        )

    def update(self, pooled: Tensor) -> None:
        sizes = [len(part.sums) for part in self.moments.values()]
        for part, sums in zip(self.moments.values(), pooled.split(sizes), strict=True):
            part.update(sums)
        self.freeze()

    def freeze(self) -> None:
        """Take the moments as they are now for all normalising until the next merge."""
        for name, part in self.moments.items():
            now = part.mean_and_std()
            if name not in self._frozen:
                self._frozen[name] = now
            for held, new in zip(self._frozen[name], now, strict=True):
                held.copy_(new)  # in place: a recorded update reads them where they are

    def frozen(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and deviation in use now, by the part of an observation they are of."""
        return dict(self._frozen)

    def state(self) -> StateDict:
        return {f"obs_moments.{name}" if name else "obs_moments": part.sums for name, part in self.moments.items()}


def _map_named(function: Callable[[str, Tensor], Tensor], tree: Tree, prefix: str = "") -> Tree:
    if isinstance(tree, dict):
        return {name: _map_named(function, part, f"{prefix}.{name}" if prefix else name) for name, part in tree.items()}
    return function(prefix, tree)
