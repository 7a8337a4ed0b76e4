"""Metrics as sums and counts instead of means, so that they can be pooled over lanes and processes."""

from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lockstep.transfer import has_float64

Totals: TypeAlias = dict[str, tuple[float, float]]
"""Sums and counts over the whole run by name."""


class Metrics:
    """Sums and counts by name: local ones per lane, still to be pooled, and global ones."""

    def __init__(self) -> None:
        self.per_lane: dict[str, Tensor] = {}
        """[L, 2] (sum, count) of the local lanes, still to be pooled."""
        self._pairs: dict[str, Tensor] = {}
        self._latest: dict[str, Tensor] = {}
        self._updates: dict[tuple[str, tuple[str, ...]], list[Tensor] | list[np.ndarray]] = {}
        """Rows of updates by group and names. There are many, so they are only summed on request."""

    @property
    def global_sums(self) -> dict[str, Tensor]:
        """[2] (sum, count) by name over all processes, equal on every process."""
        pairs = dict(self._pairs)
        for (group, names), rows in self._updates.items():
            for name, pair in _pairs_of(group, names, rows).items():
                pairs[name] = pairs[name] + pair if name in pairs else pair
        return pairs

    def add_local(self, name: str, sums: Tensor, counts: Tensor) -> None:
        """Add a sum and a count for each local lane, [L] each."""
        pair = torch.stack([widen(sums), widen(counts)], dim=-1)
        self.per_lane[name] = self.per_lane[name] + pair if name in self.per_lane else pair

    def add_global(self, name: str, total: Tensor, count: Tensor | float) -> None:
        """Add a sum and a count that are equal on every process."""
        wide = widen(total)
        on_device = isinstance(count, Tensor) and count.device == wide.device
        pair = torch.stack([wide, widen(count) if on_device else torch.full_like(wide, float(count))])  # type: ignore[arg-type]
        self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair
        self._latest[name] = pair

    def add_update(self, names: tuple[str, ...], row: Any) -> None:
        """Add an update: [count, one sum per name, gradient norm]. It counts as skipped if the norm is non-finite."""
        self._updates.setdefault(("", names), []).append(row)

    def latest(self, name: str) -> float:
        """Return the mean of the newest global entry, equal on every process. Synchronizes with the device."""
        pairs = dict(self._latest)
        for (group, names), rows in self._updates.items():
            pairs |= _pairs_of(group, names, rows[-1:])
        total, count = pairs[name].tolist()
        return float(total / max(count, 1.0))

    def with_prefix(self, group: str) -> "Metrics":
        """Return the metrics renamed to `group/name`."""
        renamed = Metrics()
        renamed.per_lane = {f"{group}/{name}": pair for name, pair in self.per_lane.items()}
        renamed._pairs = {f"{group}/{name}": pair for name, pair in self._pairs.items()}
        renamed._latest = {f"{group}/{name}": pair for name, pair in self._latest.items()}
        renamed._updates = {(f"{group}/{inner}", names): rows for (inner, names), rows in self._updates.items()}
        return renamed

    def __iadd__(self, other: "Metrics") -> Self:
        for own_sums, other_sums in ((self.per_lane, other.per_lane), (self._pairs, other._pairs)):
            for name, pair in other_sums.items():
                own_sums[name] = own_sums[name] + pair if name in own_sums else pair
        for key, rows in other._updates.items():
            self._updates[key] = [*self._updates.get(key, ()), *rows]
        self._latest |= other._latest
        return self


def widen(x: Tensor) -> Tensor:
    """Convert to the dtype of sums: float64, or float32 on a device without float64 (MPS)."""
    return x.double() if has_float64(x.device) else x.float()


def _pairs_of(group: str, names: tuple[str, ...], rows: list[Tensor] | list[np.ndarray]) -> dict[str, Tensor]:
    """Return sums and counts [2] by name of some updates, without the skipped ones."""
    # On the CPU, sum with NumPy: for a few numbers it is many times faster than torch.
    if isinstance(rows[0], np.ndarray):
        table = np.stack(rows)  # [updates, K]
        applied = np.isfinite(table[:, -1])
        sums, count = torch.from_numpy(table[applied].sum(0)), float(applied.sum())
        sums = torch.cat([sums, torch.tensor([count], dtype=torch.float64)])
    else:
        stacked = torch.stack(rows)
        finite = stacked[:, -1:].isfinite()
        sums = torch.where(finite, torch.cat([stacked, finite], dim=1), 0.0).sum(0)
    samples, *totals, norm, steps = sums.unbind()
    attempts = torch.full_like(steps, len(rows))
    pairs = {name: torch.stack([total, samples]) for name, total in zip(names, totals, strict=True)}
    pairs |= {"grad_norm": torch.stack([norm, steps]), "skipped": torch.stack([attempts - steps, attempts])}
    return {f"{group}{name}": pair for name, pair in pairs.items()}
