"""Lanes: the fixed shares of a run, and which process hosts which.

A lane owns its environments, its random streams and its share of every batch. A process only hosts adjacent lanes, so
that the number of processes of a run can change without changing its results.
"""

from dataclasses import dataclass
from itertools import pairwise

from lockstep.config import ConfigError
from lockstep.rng import LaneStreams, RandomStream


def partition_lanes(lanes: int, processes: int) -> list[range]:
    """Assign adjacent lanes to each process as evenly as possible. The first processes get the remainder."""
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
    """Number of lanes of a run (`num_lanes`) and the lanes that this process hosts (`local`)."""

    num_lanes: int
    local: range
    seed: int

    def __len__(self) -> int:
        return len(self.local)

    def per_lane(self, total: int, name: str) -> int:
        """Return the share of one lane of a global number."""
        if total < 1:
            raise ConfigError(
                f"{name} is {total}, but each of {self.num_lanes} lanes needs some.", f"Use {self.num_lanes}."
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
        """Return the rows of a local lane in a tensor with `share` rows per local lane."""
        first = self.local.index(lane) * share
        return slice(first, first + share)

    def streams(self, purpose: str) -> LaneStreams:
        """Return random streams that differ between lanes."""
        return LaneStreams([RandomStream(self.seed, purpose, lane) for lane in self.local])

    def shared_stream(self, purpose: str) -> RandomStream:
        """Return a random stream that all lanes share, for example for initialization."""
        return RandomStream(self.seed, purpose)
