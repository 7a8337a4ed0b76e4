"""CPU, GPU and memory usage of this process, by metric name."""

from contextlib import suppress

import psutil
import torch

MAX_REPORTED_PROCESSES = 64
"""Only ranks below this number report resource usage, so that logs do not get thousands of curves."""


class ResourceMonitor:
    """Reads the resource usage of one process. CPU usage covers the time since the last reading."""

    def __init__(self, process: int, device: torch.device) -> None:
        self._process, self._device = process, device
        self._system = psutil.Process()
        self._system.cpu_percent()  # the first reading has nothing to compare with

    def read(self) -> dict[str, float]:
        """Return percentages (of one core, of the GPU) and gigabytes. Skip values that the system does not provide."""
        if self._process >= MAX_REPORTED_PROCESSES:
            return {}
        found: dict[str, float] = {}
        with suppress(psutil.Error, OSError):
            found[f"process{self._process}_cpu_percent"] = self._system.cpu_percent()
            found[f"process{self._process}_memory_gb"] = self._system.memory_info().rss / 1e9
        if self._device.type == "cuda":
            found[f"gpu{self._process}_memory_allocated_gb"] = torch.cuda.memory_allocated(self._device) / 1e9
            with suppress(Exception):  # the extra `gpu` is not installed, or the driver fails; this metric is optional
                found[f"gpu{self._process}_util_percent"] = float(torch.cuda.utilization(self._device))
        return found
