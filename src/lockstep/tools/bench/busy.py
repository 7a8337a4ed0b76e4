"""Warn before a measurement if other programs use the CPU cores."""

import os
import time
from contextlib import suppress

import psutil

from lockstep.io.rich_console import PrintableConsole

BUSY_FRACTION = 0.2
"""Fraction of the cores in use by other programs from which a measurement is not reliable."""
INTERVAL = 0.5
"""Seconds for which the load is measured."""


def warn_if_busy() -> None:
    """Print a line to standard error if other programs use more than `BUSY_FRACTION` of the cores."""
    if (busy := load_of_others()) > BUSY_FRACTION:
        PrintableConsole(stderr=True).print(
            f"Other programs use {busy:.0%} of the CPU cores: speeds will be measured too low.", soft_wrap=True
        )


def load_of_others() -> float:
    """Return the fraction of the cores of this process that other programs use."""
    started, own = time.monotonic(), _own_seconds()
    percents = psutil.cpu_percent(INTERVAL, percpu=True)
    own, seconds = _own_seconds() - own, time.monotonic() - started
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(percents))
    used = [percents[core] for core in cores if core < len(percents)] or percents
    return max(0.0, sum(used) / 100 - max(0.0, own) / seconds) / len(used)


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its children, which may still be importing torch."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total
