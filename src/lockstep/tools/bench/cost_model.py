"""Dollars and hours of a run on machines that are interrupted, and the save interval that minimizes them.

Interruptions are independent and have a constant rate. One of them stops the run, which continues from its newest
checkpoint on other machines. A run is a sequence of segments, each of an interval of training and a save. With rate
r, restart R and segment S, a segment takes exp(rR) (exp(rS) - 1) / r on average (Daly 2006): it is repeated until no
interruption occurs in it, and restarts can be interrupted too.
"""

import math
from dataclasses import dataclass

DAY = 86_400.0
MIN_INTERVAL = 10.0
"""Seconds between saves at least, as in automatic saves."""


@dataclass(frozen=True)
class Interruptions:
    """What interrupts a run, and what it then loses."""

    per_day: float
    """Interruptions of the whole run per day."""
    save_seconds: float
    """Seconds by which a save delays training."""
    restart_seconds: float
    """Seconds from an interruption until the run trains again."""
    notice: bool = False
    """Whether machines announce the interruption, so that the run saves before it."""

    @property
    def rate(self) -> float:
        return self.per_day / DAY

    def best_interval(self, work: float) -> float:
        """Return the seconds of training between two saves that minimize the time of `work` seconds."""
        if self.rate == 0 or self.notice:
            return work
        # The derivative of (exp(r(x + save)) - 1) / x is zero where (1 - rx) exp(rx) = exp(-r save). With u = rx, the
        # left side falls from 1 at u = 0 to 0 at u = 1.
        target, low, high = math.exp(-self.rate * self.save_seconds), 0.0, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if (1 - middle) * math.exp(middle) > target else (low, middle)
        return min(max(high / self.rate, MIN_INTERVAL), work)

    def expected_seconds(self, work: float, interval: float) -> float:
        """Return the mean time of `work` seconds of training with a save after each interval. May be infinite."""
        saves = math.ceil(round(work / interval, 9))
        if self.rate == 0:
            return work + saves * self.save_seconds
        if self.notice:  # nothing is trained again: each interruption costs a save and a restart
            lost = self.rate * (self.save_seconds + self.restart_seconds)
            return (work + saves * self.save_seconds) / (1 - lost) if lost < 1 else math.inf
        segment = work / saves + self.save_seconds
        try:
            return saves * math.exp(self.rate * self.restart_seconds) * math.expm1(self.rate * segment) / self.rate
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Bill:
    """Time and price of a run on one kind of machine."""

    kind: str
    processes: int
    hours: float
    """From start to end, with saves and interruptions."""
    training_hours: float
    """The same without saves and interruptions."""
    dollars: float
    interruptions: float
    """Expected number."""
    save_interval: float
    """Seconds between saves."""


def bill(kind: str, processes: int, training_hours: float, price: float, what: Interruptions) -> Bill:
    """Return the bill with the best save interval. `price` is that of one GPU for an hour."""
    work = training_hours * 3600
    interval = what.best_interval(work)
    hours = what.expected_seconds(work, interval) / 3600
    return Bill(kind, processes, hours, training_hours, hours * processes * price, what.per_day * hours / 24, interval)


def parse_interruptions(text: str) -> float:
    """Return interruptions per day, from a text such as `4/day`. Raises ValueError."""
    count, _, unit = text.partition("/")
    number = float(count) * {"hour": 24.0, "day": 1.0, "week": 1 / 7}.get(unit, math.nan)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number
