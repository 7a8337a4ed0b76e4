"""Running mean and variance of observations and returns from pooled sums, frozen while a rollout is collected.

Shapes: T steps, B local environments, L local lanes, N samples per lane, D features.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.data.rollout import flatten_rollout
from lockstep.metrics import widen
from lockstep.ops.functional import moments
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, named_leaves
from lockstep.transfer import upload


class RunningMeanStd:
    """Mean and variance of a vector over all samples of the run."""

    def __init__(self, features: int, device: torch.device) -> None:
        self.sums = widen(torch.zeros(2 * features + 1, device=device))
        """Sums, sums of squares, and the count."""

    @staticmethod
    def batch_stats(samples: Tensor, active: Tensor | None = None) -> Tensor:
        """Sum samples [L, N, D] per lane to [L, 2D + 1], one lane at a time so that bits do not depend on L.

        Samples whose `active` [L, N] is 0 are not counted.
        """
        samples = widen(samples)
        counts = samples.new_full((len(samples), 1), float(samples.shape[1]))
        if active is not None:
            samples, counts = samples * active.unsqueeze(-1), widen(active).sum(1, keepdim=True)
        lanes = zip(samples, counts, strict=True)
        return torch.stack([torch.cat([lane.sum(0), lane.square().sum(0), count]) for lane, count in lanes])

    def update(self, pooled: Tensor) -> None:
        """Add the pooled table of an iteration, [2D + 1] on the host."""
        self.sums += upload(pooled, self.sums.device)

    def mean_and_std(self, epsilon: float = 1e-8) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, [D] float32; (0, 1) before the first update."""
        total, squares = self.sums[:-1].chunk(2)
        mean, variance = moments(total, squares, self.sums[-1])
        has_samples = self.sums[-1] > 0
        std = torch.where(has_samples, (variance + epsilon).sqrt(), torch.ones_like(variance))
        return mean.float(), std.float()


def normalize(obs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalize observations [N, ...] by mean and standard deviation [D]; clip to +-10."""
    return ((obs.unsqueeze(-1).flatten(1) - mean) / std).clamp(-10.0, 10.0).view(obs.shape)


class ObservationNormalizer:
    """Normalizes the floating-point parts of observations and clips them to +-10. Other dtypes do not change."""

    def __init__(self, example: Tree, enabled: bool) -> None:
        """`example` is a batch of observations, [B, ...]."""
        parts = {name: part for name, part in named_leaves(example).items() if enabled and part.is_floating_point()}
        self.moments = {name: RunningMeanStd(part[0].numel(), part.device) for name, part in parts.items()}
        self.frozen: dict[str, tuple[Tensor, Tensor]] = {}
        """Mean and standard deviation in use, by part of the observation."""
        self.freeze()

    def __call__(self, obs: Tree, name: str = "") -> Tree:
        """Normalize observations [N, ...] with the frozen moments. `name` is that of the part of an observation."""
        if not self.moments:
            return obs
        if isinstance(obs, dict):
            return {key: self(part, f"{name}.{key}" if name else key) for key, part in obs.items()}
        return normalize(obs, *self.frozen[name]) if name in self.frozen else obs

    def batch_stats(self, obs: Tree, active: Tensor | None = None) -> Tensor:
        """Sum the observations [L, N, ...] of this process into one table [L, K] for the all-reduce.

        Those whose `active` [L, N] is 0 are not counted.
        """
        parts = named_leaves(obs)
        tables = [RunningMeanStd.batch_stats(parts[name].unsqueeze(-1).flatten(2), active) for name in self.moments]
        return torch.cat(tables, dim=1)

    def update(self, pooled: Tensor) -> None:
        sizes = [len(part.sums) for part in self.moments.values()]
        for part, sums in zip(self.moments.values(), pooled.split(sizes), strict=True):
            part.update(sums)
        self.freeze()

    def freeze(self) -> None:
        """Use the current moments for normalization until the next update."""
        for name, part in self.moments.items():
            current = part.mean_and_std()
            for frozen, new in zip(self.frozen.setdefault(name, current), current, strict=True):
                frozen.copy_(new)  # in place: a CUDA graph reads them at fixed addresses

    def state(self) -> StateDict:
        return {f"obs_moments.{name}" if name else "obs_moments": part.sums for name, part in self.moments.items()}


class RewardNormalizer:
    """Divides rewards by the running standard deviation of the discounted return, and clips them to +-10."""

    def __init__(self, envs: int, device: torch.device, gamma: float) -> None:
        self.moments, self._gamma = RunningMeanStd(1, device), gamma
        self.discounted = torch.zeros(envs, device=device)  # [B], discounted return so far

    def batch_stats(self, outcomes: dict[str, Any], lanes: int) -> Tensor:
        """Sum the discounted returns of a rollout [T, B] into a table [L, 3] for the all-reduce."""
        rewards, ended = outcomes["reward"], outcomes["terminated"] | outcomes["truncated"]
        discounted, running = torch.empty_like(rewards), self.discounted
        for t in range(len(rewards)):
            running = running * self._gamma + rewards[t]
            discounted[t] = running
            running = running * ~ended[t]
        self.discounted.copy_(running)
        names = {"discounted": discounted} | ({"active": outcomes["active"]} if "active" in outcomes else {})
        samples = {name: flatten_rollout(x, lanes).view(lanes, -1) for name, x in names.items()}  # [L, N]
        return RunningMeanStd.batch_stats(samples["discounted"].unsqueeze(-1), samples.get("active"))

    def update(self, pooled: Tensor) -> None:
        self.moments.update(pooled)

    def __call__(self, rewards: Tensor) -> Tensor:
        """Normalize rewards [T, B] by all discounted returns so far, those of this rollout included."""
        return (rewards / self.moments.mean_and_std()[1]).clamp(-10.0, 10.0)
