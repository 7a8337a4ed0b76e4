"""Gymnasium environments in worker processes: the methods of `SyncEnvs`, with a table in shared memory.

A worker is a fresh Python process, not a fork: a process that has started threads (torch's, CUDA's) cannot be forked
safely. Of W workers, each takes every W-th row, so that several workers replay the environments of one lane.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import IO, Any

import numpy as np
import torch

from lockstep.config import ConfigError
from lockstep.tasks.gym.sync_envs import SharedArrays
from lockstep.tasks.gym.worker_protocol import (
    Message,
    Request,
    Response,
    lay_out,
    layout_of,
    pack,
    receive,
    send,
    size_of,
    unpack,
)

PATIENCE = 5.0
"""Seconds for workers to close their environments before they are killed."""


class WorkerError(RuntimeError):
    """A worker failed or died. The message names the worker, its exit code or signal, and its last output."""


class EnvWorker:
    """Handle of one worker process in the parent."""

    def __init__(self, name: str, memory: int) -> None:
        self.name = name
        self.channel, theirs = socket.socketpair()
        # Workers import from the same paths and use the same number of threads, so that torch sums are equal.
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        threads = str(torch.get_num_threads())
        with closing(theirs):
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.tasks.gym.worker", str(theirs.fileno()), str(memory)],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads},
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self._lines: deque[str] = deque(maxlen=50)
        self._reader = threading.Thread(target=_forward, args=(self.process.stderr, self._lines), daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker died; `receive` reports it
            send(self.channel, message)

    def receive(self) -> Message:
        """Return the worker's response; raise if it failed or died."""
        response = receive(self.channel)
        if response is not None and response.kind != Response.FAILED:
            return response
        output = response.body.decode() if response else ""
        code = self.await_end(PATIENCE)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        output = "".join(self._lines) + output
        raise WorkerError(f"{self.name} {how}." + (f" Its last output:\n{output.rstrip()}" if output else ""))

    def await_end(self, seconds: float) -> int:
        """Return the exit code, or minus the signal that ended the worker. Kill it after a timeout."""
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(1.0)  # with a timeout: a child process of the environment may keep the pipe open
        return code


class WorkerPool:
    """Environments in worker processes; `table` is in shared memory."""

    def __init__(
        self, id: str, options: Mapping[str, Any], forms: SharedArrays, workers: int, places: Sequence[int]
    ) -> None:
        """`forms` is a table with the shapes to share; `places` are the global indices of the environments."""
        if os.name != "posix":
            raise ConfigError(
                f"--task.num-workers is {workers}, and workers need Linux or macOS.", "Use --task.num-workers 0."
            )
        layout = layout_of(forms._asdict())
        memory = _shared_memory(size_of(layout))  # a file descriptor
        self.table = SharedArrays(**lay_out(layout, mmap.mmap(memory, 0), slice(None)))
        self._id, self._workers = id, list[EnvWorker]()
        self._end = weakref.finalize(self, _end, self._workers)
        settings = {
            "id": id,
            "options": options,
            "layout": layout,
            "workers": workers,
            # The signal is sent when the thread that started a worker ends, so only the main thread requests it.
            "die_with_parent": threading.current_thread() is threading.main_thread(),
        }
        body, every = json.dumps(settings).encode(), range(workers)
        try:
            for number in every:
                name = (
                    f"Worker {number} of {workers}, with the environments {_listed(places[number::workers])} of {id},"
                )
                self._workers.append(EnvWorker(name, memory))
            self._ask({number: Message(Request.SETTINGS, number, body) for number in every})
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(memory)
        self._step = {number: Message(Request.STEP) for number in every}

    def begin(self, seeds: Mapping[int, int]) -> None:
        self._ask_owners(Request.BEGIN, seeds)

    def step(self) -> None:
        self._ask(self._step)

    def replay(self, episodes: Mapping[int, np.ndarray]) -> set[int]:
        responses = self._ask_owners(Request.REPLAY, episodes)
        count = len(self._workers)
        return {place * count + worker for worker, response in responses.items() for place in json.loads(response.body)}

    def render_text(self, row: int) -> str:
        return self._ask_one(Request.TEXT, row).decode()

    def render(self, row: int) -> np.ndarray:
        return unpack(self._ask_one(Request.FRAME, row))[0]

    def close(self) -> None:
        self._end()

    def _ask_one(self, kind: bytes, row: int) -> bytes:
        place, worker = divmod(row, len(self._workers))
        return self._ask({worker: Message(kind, place)})[worker].body

    def _ask_owners(self, kind: bytes, values: Mapping[int, Any]) -> dict[int, Message]:
        """Send a value for each of some rows to the workers that hold these rows."""
        shares: dict[int, dict[int, Any]] = {}
        for row, value in values.items():
            place, worker = divmod(row, len(self._workers))
            shares.setdefault(worker, {})[place] = value
        return self._ask({worker: Message(kind, body=pack(share)) for worker, share in shares.items()})

    def _ask(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        """Send requests to some workers, which run in parallel, and wait for all responses."""
        if not self._end.alive:
            raise WorkerError(f"The workers of {self._id} have ended. Build the environments again.")
        try:
            for worker, request in requests.items():
                self._workers[worker].send(request)
            responses = {worker: self._workers[worker].receive() for worker in requests}
        except BaseException:
            # Also on Ctrl-C: an unread response would be taken for the response to the next request.
            self._kill()
            raise
        for response in responses.values():
            if response.kind == Response.REFUSED:
                raise ConfigError(response.body.decode())
        return responses

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._end()


def _end(workers: Sequence[EnvWorker]) -> None:
    """Let workers close their environments and exit; kill those that do not."""
    for worker in workers:
        worker.channel.close()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.await_end(deadline - time.monotonic())


def _shared_memory(size: int) -> int:
    """Return a file descriptor of anonymous memory. The system frees it when its last user exits, even by a crash."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("lockstep")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


def _forward(stream: IO[bytes], lines: "deque[str]") -> None:
    """Forward a worker's stderr to this process, and keep the last lines."""
    with stream:
        for line in stream:
            lines.append(line.decode(errors="replace"))
            with suppress(OSError, ValueError):  # stderr of this process may be closed
                sys.stderr.write(lines[-1])


def _listed(places: Sequence[int]) -> str:
    shown = [str(place) for place in places]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])
