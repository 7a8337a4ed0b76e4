"""How hard this process and its GPU work, as the system tells; under the names by which a log keeps it."""

from contextlib import suppress

import psutil
import torch

MAX_REPORTED_PROCESSES = 64
"""Processes beyond so many are not told of one by one: a log of thousands of curves is read by nobody."""


class ResourceMonitor:
    """Reads one process, over the time since it was last read."""

    def __init__(self, process: int, device: torch.device) -> None:
        self._process, self._device = process, device
        self._system = psutil.Process()
        self._system.cpu_percent()  # the first reading has nothing to compare with

    def read(self) -> dict[str, float]:
        """Shares of one core in percent, and gigabytes; nothing of what the system does not tell."""
        if self._process >= MAX_REPORTED_PROCESSES:
            return {}
        found: dict[str, float] = {}
        with suppress(psutil.Error, OSError):
            found[f"process{self._process}_cpu_percent"] = self._system.cpu_percent()
            found[f"process{self._process}_memory_gb"] = self._system.memory_info().rss / 1e9
        if self._device.type == "cuda":
            found[f"gpu{self._process}_memory_allocated_gb"] = torch.cuda.memory_allocated(self._device) / 1e9
            with suppress(Exception):  # the extra `gpu` is missing, or its driver does not answer: no reason to stop
                found[f"gpu{self._process}_util_percent"] = float(torch.cuda.utilization(self._device))
        return found
