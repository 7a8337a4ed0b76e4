"""Bounds on what the import of a foreign file may cost: memory and processor time, whatever the file says."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lockstep.config import ConfigError

MEMORY = 2 * 2**30
"""Bytes an import may allocate beyond three times the size of the file: the weights, the network, and a copy."""
SECONDS = 100.0
"""Processor seconds an import may take."""


@contextmanager
def bounded(path: Path, memory: int = MEMORY, seconds: float = SECONDS) -> Iterator[None]:
    """Refuse a file whose import needs too much memory or time, in place of being killed or never ending.

    Readers check sizes before they read. This is the bound behind them, for what only building the network shows.
    """
    allowed = memory + 3 * path.stat().st_size
    before = _limit_memory(allowed)
    handler = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _TooLong:
        raise ConfigError(f"{path} took more than {seconds:.0f} s of processor time.", _FIX) from None
    except MemoryError:
        raise _too_large(path, allowed) from None
    except RuntimeError as error:
        if "memory" not in str(error):  # torch's own words for it: "not enough memory: you tried to allocate"
            raise
        raise _too_large(path, allowed) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)
        if before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, before)


_FIX = "Check the settings it brings along (num_envs, the size of the network), and give smaller ones as flags."


class _TooLong(BaseException):
    """Raised by the timer; not an Exception, so that no reader takes it for a fault of the file."""


def _too_long(_: int, __: FrameType | None) -> None:
    raise _TooLong


def _too_large(path: Path, allowed: int) -> ConfigError:
    return ConfigError(f"{path} needs more than {allowed / 2**30:.1f} GiB of memory.", _FIX)


def _limit_memory(allowed: int) -> tuple[int, int] | None:
    """Limit what this process may allocate beyond what it has; the limits before, or None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = data + allowed
    if soft != resource.RLIM_INFINITY:
        wanted = min(wanted, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    return soft, hard
