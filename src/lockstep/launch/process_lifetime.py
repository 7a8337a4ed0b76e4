"""A process that another one started does not outlive it: nobody trains on, or steps environments, for no one."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path

ENV_LAUNCH_DIR = "LOCKSTEP_LAUNCH_DIR"
"""Set in the processes our own launcher starts, to a directory it shares with them: it speaks to the user for them."""
LAUNCHER, SERVER, PEER_FAILED, OUTCOME = "launcher", "server", "peer-failed", "outcome"
"""Files in that directory: the launcher's process number; that of its fork server, if it has one; that a process
failed, so leave at once; and how a run ended that ended in good order."""
ENV_PROGRESS_FD = "LOCKSTEP_PROGRESS_FD"
"""Set in the processes our own launcher starts, to the descriptor of a pipe on which it reads their progress."""
ENV_PARENT_PID = "LOCKSTEP_PARENT_PID"
"""Set in a process that a run starts for work beside it, to the run's process number."""
EXIT_PEER_FAILED = 128 + signal.SIGTERM
"""The exit code of a process that left because another one had failed."""


STACKS = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""The signal on which a process writes the stacks of its threads for our launcher."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it dies, even in the middle of a step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def die_with_launcher() -> None:
    """The same for a process that a run, our launcher or torchrun started; it leaves if ours has died already."""
    if ENV_PARENT_PID in os.environ:
        die_with_parent()
        if str(os.getppid()) != os.environ[ENV_PARENT_PID]:
            os._exit(EXIT_PEER_FAILED)
    if started_by_a_launcher():
        die_with_parent()
    shared = launch_directory()
    if shared is None:
        return
    if os.getppid() not in (launcher_pid(), _read_pid(shared / SERVER)):
        os._exit(EXIT_PEER_FAILED)


def launcher_pid() -> int:
    """Process number of the launcher that started this process; of its parent under torchrun, 0 if it is unknown."""
    shared = launch_directory()
    return os.getppid() if shared is None else _read_pid(shared / LAUNCHER)


def _read_pid(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def launch_directory() -> Path | None:
    """The directory that our launcher shares with this process, where it was started by one."""
    return Path(os.environ[ENV_LAUNCH_DIR]) if ENV_LAUNCH_DIR in os.environ else None


def started_by_a_launcher() -> bool:
    """Whether our launcher or torchrun started this process."""
    return ENV_LAUNCH_DIR in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def crash_file(rank: int) -> str:
    """Where in that directory a process leaves its stack when it crashes in native code."""
    return f"crash-{rank}.txt"


def stacks_file(rank: int) -> str:
    """Where in that directory a process leaves the stacks of its threads when our launcher asks for them."""
    return f"stacks-{rank}.txt"


def backend_file(rank: int) -> str:
    """Where in that directory a process leaves the name of its process group's backend."""
    return f"backend-{rank}.txt"


def phase_file(rank: int) -> str:
    """Where in that directory the phase stands that a process is in, whatever becomes of it."""
    return f"phase-{rank}.txt"
