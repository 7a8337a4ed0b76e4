"""Run a command with a time limit and bounded output. No process of it is left running."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from lockstep.launch.process_lifetime import die_with_parent

OUTPUT_BYTES = 8 * 2**10
"""Bytes of output that are kept: the last ones."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    code: int | None
    """Exit code, negative for a signal. None: killed at the time limit."""
    output: str
    """The end of standard output and error."""
    seconds: float

    @property
    def problem(self) -> str:
        """Why the command counts as failed. Empty if it did not fail."""
        if self.code is None:
            return f"not finished after {self.seconds:.0f} s, the time limit of this step"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}" if self.code else ""


def run(command: Sequence[str], environment: Mapping[str, str], limit: float | None = None) -> CommandResult:
    """Run a command that ends with this process; after `limit` seconds kill it with every process that it started.

    With a limit, the command gets a session of its own, so that an interrupt from the terminal does not reach it.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=limit is not None,
            preexec_fn=die_with_parent,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        seconds = time.monotonic() - start
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        return CommandResult(code, output.read(OUTPUT_BYTES).decode(errors="replace").strip(), seconds)


def kill_tree(pid: int) -> None:
    """Kill a process, its process group and all its descendants in any process group."""
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
