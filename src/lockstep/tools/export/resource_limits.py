"""Limits on the memory and CPU time that importing an untrusted file may use."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lockstep.config import ConfigError

MEMORY = 2 * 2**30
"""Bytes that an import may allocate in addition to `FILE_SIZES` times the size of the file."""
FILE_SIZES = 10
"""Weights, two networks with gradients and moments of the optimizers, and the checkpoint."""
SECONDS = 100.0
"""CPU seconds that an import may take."""


@contextmanager
def bounded(path: Path, memory: int = MEMORY, seconds: float = SECONDS) -> Iterator[None]:
    """Raise ConfigError if the import of a file needs too much memory or CPU time.

    Readers check sizes before they read. This limit also covers costs that appear only when the network is built.
    """
    allowed = memory + FILE_SIZES * path.stat().st_size
    previous = _limit_memory(allowed)
    handler = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _TooLong:
        raise ConfigError(f"{path} took more than {seconds:.0f} s of processor time.", _FIX) from None
    except (MemoryError, RuntimeError) as error:
        # torch's message: "not enough memory: you tried to allocate"
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise ConfigError(f"{path} needs more than {allowed / 2**30:.1f} GiB of memory.", _FIX) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, handler)
        if previous is not None:
            resource.setrlimit(resource.RLIMIT_DATA, previous)


_FIX = "Check the settings in the file (num_envs, the network, algo.buffer_size), and override them with smaller flags."


class _TooLong(BaseException):
    """Raised by the timer. Not an Exception, so that no reader handles it as an invalid file."""


def _too_long(_: int, __: FrameType | None) -> None:
    raise _TooLong


def _limit_memory(allowed: int) -> tuple[int, int] | None:
    """Limit further allocations of this process. Return the previous limits, or None without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    data = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data + allowed
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return soft, hard
