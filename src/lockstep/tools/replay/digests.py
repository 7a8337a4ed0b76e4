"""Digest logs of two runs, or of a run and its replay: the first samples at which they differ."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError
from lockstep.digest_log import digest_metrics
from lockstep.io.jsonl import DIGESTS, iter_jsonl

LOG_BYTES = 2**30
"""Bytes of a digests.jsonl that are read."""
Digests = dict[int, dict[str, Any]]
"""Lines of a digest log by number of samples."""
NO_METRICS = digest_metrics({})


@dataclass(frozen=True)
class Difference:
    """Where two logs differ first."""

    samples: int
    iteration: int
    equal_until: int
    """Samples of the last equal digests before; 0 if there are none."""
    agent: bool
    """Whether the agents differ; otherwise only the metrics do."""


def read_digests(run: Path) -> Digests:
    """Return the digest log of a run."""
    lines = iter_jsonl(run / DIGESTS, LOG_BYTES)
    fields = ("samples", "iteration")
    return {
        line["samples"]: line
        for line in lines
        if all(type(line.get(name)) is int for name in fields) and "agent" in line
    }


def first_difference(one: Digests, other: Digests) -> tuple[int, Difference | None]:
    """Return how many digests of two logs are comparable, and where they differ first. None: nowhere."""
    common = sorted(one.keys() & other.keys())
    equal_until = 0
    for samples in common:
        first, second = one[samples], other[samples]
        agent = first["agent"] != second["agent"]
        metrics = first.get("metrics"), second.get("metrics")
        if agent or (metrics[0] != metrics[1] and NO_METRICS not in metrics):  # a replay has none where it starts
            return len(common), Difference(samples, first["iteration"], equal_until, agent)
        equal_until = samples
    return len(common), None


def samples_before(run: Path, update: int) -> int:
    """Return a number of samples at which a run had not made an update yet, as late as its digest log knows.

    Raises:
        ConfigError: The run has made fewer updates.
    """
    lines = [line for line in read_digests(run).values() if type(line.get("updates")) is int]
    if not lines:  # logging was off, or an older version wrote the log
        return 0
    newest = max(line["updates"] for line in lines)
    if update > newest:
        raise ConfigError(f"{run} has made {newest:,} updates.", f"Use --update with a number up to {newest}.")
    return max((line["samples"] for line in lines if line["updates"] < update), default=0)
