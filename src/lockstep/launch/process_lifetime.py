"""Make child processes exit when their parent dies, and name the files that workers share with their launcher."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

ENV_LAUNCH_DIR = "LOCKSTEP_LAUNCH_DIR"
"""Set in workers of our launcher: a directory that they share with it. The launcher prints messages for them."""
LAUNCHER, SERVER, PEER_FAILED, OUTCOME = "launcher", "server", "peer-failed", "outcome"
"""Files in that directory: pid of the launcher; pid of its fork server, if any; marker that a process failed, so that
the others exit immediately; outcome of a run that ended without a failure."""
CRASH_FILE, STACKS_FILE, BACKEND_FILE, PHASE_FILE = "crash-{}.txt", "stacks-{}.txt", "backend-{}.txt", "phase-{}.txt"
"""Files of each rank in that directory: stack of a process that crashed in native code; stacks of all threads, written
on request of our launcher; backend of the process group; current phase."""
ENV_PROGRESS_FD = "LOCKSTEP_PROGRESS_FD"
"""Set in workers of our launcher: the descriptor of the pipe to which they write their progress."""
ENV_PARENT_PID = "LOCKSTEP_PARENT_PID"
"""Set in helper processes of a run: the pid of the run's process."""
EXIT_PEER_FAILED = 128 + signal.SIGTERM
"""Exit code of a process that exited because another one had failed."""


STACKS = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal on which a process writes the stacks of its threads for our launcher."""


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, even in the middle of a step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """Exit when the parent dies, if a run, our launcher or torchrun started this process.

    Exit immediately if the parent run or our launcher has already died.
    """
    if ENV_PARENT_PID in os.environ:
        die_with_parent()
        # Removed: the processes that this one starts have another parent.
        if str(os.getppid()) != os.environ.pop(ENV_PARENT_PID):
            os._exit(EXIT_PEER_FAILED)
    if started_by_a_launcher():
        die_with_parent()
    shared = launch_directory()
    if shared is not None and os.getppid() not in (launcher_pid(), _read_pid(shared / SERVER)):
        os._exit(EXIT_PEER_FAILED)


def launcher_pid() -> int:
    """Return the pid of our launcher; of the parent process under torchrun; 0 if unknown."""
    shared = launch_directory()
    return os.getppid() if shared is None else _read_pid(shared / LAUNCHER)


def _read_pid(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def launch_directory() -> Path | None:
    """Return the directory that our launcher shares with this process; None if it did not start it."""
    return Path(os.environ[ENV_LAUNCH_DIR]) if ENV_LAUNCH_DIR in os.environ else None


def started_by_a_launcher() -> bool:
    """Return whether our launcher or torchrun started this process."""
    return ENV_LAUNCH_DIR in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
