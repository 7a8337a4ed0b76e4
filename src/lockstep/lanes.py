"""Lanes: the fixed shares a run is cut into, and who hosts which.

A lane owns its environments, its random streams and its part of every batch; a process hosts a few neighbouring lanes
and owns nothing. That is what lets a run change its number of processes and stay the same run.
"""

from dataclasses import dataclass
from itertools import pairwise

from lockstep.config import ConfigError
from lockstep.rng import LaneStreams, RandomStream


def partition_lanes(lanes: int, processes: int) -> list[range]:
    """Neighbouring lanes for each process, as even as can be, the first ones taking what is left over."""
    if not 1 <= processes <= lanes:
        raise ConfigError(
            f"{processes} processes cannot host {lanes} lanes: every process needs at least one.",
            f"Start at most {lanes} processes. A new run can be given more lanes with --run.lanes.",
        )
    share, extra = divmod(lanes, processes)
    starts = [process * share + min(process, extra) for process in range(processes + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


@dataclass(frozen=True)
class Lanes:
    """The lanes of a run (`count`) and the ones this process hosts (`local`)."""

    num_lanes: int
    local: range
    seed: int

    def __len__(self) -> int:
        return len(self.local)

    def per_lane(self, total: int, name: str) -> int:
        """How much of a global number falls on one lane."""
        if total < 1:
            raise ConfigError(
                f"{name} is {total}, and each of {self.num_lanes} lanes needs some.", f"Use {self.num_lanes}."
            )
        if total % self.num_lanes:
            below = total - total % self.num_lanes
            choices = f"{below} or {below + self.num_lanes}" if below else f"{self.num_lanes}"
            divisor = max(lanes for lanes in range(1, min(self.num_lanes, total) + 1) if total % lanes == 0)
            raise ConfigError(
                f"{name} is {total}, which {self.num_lanes} lanes cannot share evenly.",
                f"Use {choices}, or set --run.lanes {divisor}.",
            )
        return total // self.num_lanes

    def lane_slice(self, lane: int, share: int) -> slice:
        """Where a local lane's part lies in what is kept of all of them, `share` rows for each."""
        first = self.local.index(lane) * share
        return slice(first, first + share)

    def streams(self, purpose: str) -> LaneStreams:
        """Randomness that differs between lanes."""
        return LaneStreams(tuple(RandomStream(self.seed, purpose, lane) for lane in self.local))

    def shared_stream(self, purpose: str) -> RandomStream:
        """Randomness that all lanes share, such as initialisation."""
        return RandomStream(self.seed, purpose)
