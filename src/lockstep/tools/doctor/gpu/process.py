"""Run a command with a time limit and bounded output. No process of it is left running."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

KEPT = 8 * 2**10
"""Bytes of output that are kept: the last ones."""


@dataclass(frozen=True)
class Ended:
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
            return f"ended by {_signal_name(-self.code)}"
        return f"exit code {self.code}" if self.code else ""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit: float | None = None,
    prepare: Callable[[], None] | None = None,
) -> Ended:
    """Run a command; after `limit` seconds kill it with every process that it started.

    With a limit, the command gets a session of its own, so that an interrupt from the terminal does not reach it.
    `prepare` is called in the new process before the command starts.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=limit is not None,
        preexec_fn=prepare,
    )
    assert process.stdout is not None
    tail = _Tail(process.stdout)
    code: int | None = None
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()
    return Ended(code, tail.text(), time.monotonic() - began)


def kill_tree(pid: int) -> None:
    """Kill a process, its process group and all its descendants in any process group."""
    with contextlib.suppress(psutil.Error):
        tree = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()


class _Tail:
    """Reads a pipe to its end in a thread and keeps the last bytes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._bytes = pipe, b""
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while piece := os.read(self._pipe.fileno(), 2**16):
            self._bytes = (self._bytes + piece)[-KEPT:]

    def text(self) -> str:
        """The end of the output. Does not wait long: a process that was not killed may hold the pipe open."""
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._pipe.close()
        return self._bytes.decode(errors="replace").strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
