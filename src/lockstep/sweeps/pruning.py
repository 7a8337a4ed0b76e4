"""Which trials continue after a rung, a number of samples at which trials are compared.

A decision about a trial depends only on the values of trials with lower numbers. It is therefore the decision that
would have been made if the trials had been trained one after another, whatever their order in time.
"""

import math
from collections.abc import Sequence
from statistics import median

from lockstep.sweeps.record import SweepRecord

MEDIAN_STARTUP = 5
"""Trials with a value at a rung before the median rule applies, as in Optuna."""
ASHA_RUNGS, MEDIAN_RUNGS = 2, 4
"""Default: ASHA has two rungs below the end, and the median rule applies after each quarter of a trial."""
PBT_RUNGS = 10
"""Default: population-based training replaces trials after each tenth."""


def default_min_samples(prune: str, total_samples: int, eta: int) -> int:
    """Return the default number of samples of the first rung."""
    shares: int = {"asha": eta**ASHA_RUNGS, "median": MEDIAN_RUNGS, "pbt": PBT_RUNGS}.get(prune, 1)
    return math.ceil(total_samples / shares)


def rungs(record: SweepRecord) -> list[int]:
    """Return the samples at which trials are compared. The end, at `total_samples`, is the last."""
    samples = []
    rung = record.min_samples
    while record.prune != "none" and rung < record.total_samples:
        samples.append(rung)
        rung = rung * record.eta if record.prune == "asha" else rung + record.min_samples
    return [*samples, record.total_samples]


def continues(record: SweepRecord, value: float, before: Sequence[float]) -> bool:
    """Return whether a trial continues after a rung.

    Args:
        record: The sweep.
        value: Value of the trial at this rung.
        before: Values at this rung of the trials with lower numbers that reached it.
    """
    score, others = record.sign * value, [record.sign * other for other in before]
    if record.prune == "asha":  # Li et al. (2020), arXiv:1810.05934: the best 1 / eta of the rung, at least one
        ranked = sorted([*others, score], reverse=True)
        return score >= ranked[max(0, len(ranked) // record.eta - 1)]
    if record.prune == "median" and len(others) >= MEDIAN_STARTUP:
        return score >= median(others)
    return True
