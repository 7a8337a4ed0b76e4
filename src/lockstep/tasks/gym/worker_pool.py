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
from lockstep.tasks.gym.sync_envs import SharedArrays, ended_rows
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

EXIT_TIMEOUT = 5.0
"""Seconds for workers to close their environments before they are killed."""


class WorkerError(RuntimeError):
    """A worker failed or died. The message names the worker, its exit code or signal, and its last output."""


class EnvWorker:
    """Handle of one worker process in the parent."""

    def __init__(self, name: str, memory: int) -> None:
        self.name = name
        self.channel, child_channel = socket.socketpair()
        # Workers import from the same paths and use the same number of threads, so that torch sums are equal.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        threads = str(torch.get_num_threads())
        with closing(child_channel):
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.tasks.gym.worker", str(child_channel.fileno()), str(memory)],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads},
                pass_fds=(child_channel.fileno(), memory),
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
        code = self.wait(EXIT_TIMEOUT)
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        output = "".join(self._lines) + output
        raise WorkerError(f"{self.name} {cause}." + (f" Its last output:\n{output.rstrip()}" if output else ""))

    def wait(self, seconds: float) -> int:
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

    shared_seed = False

    def __init__(
        self, id: str, options: Mapping[str, Any], template: SharedArrays, workers: int, env_indices: Sequence[int]
    ) -> None:
        """`template` is a table with the shapes to share; `env_indices` are the global indices of the environments."""
        if os.name != "posix":
            raise ConfigError(
                f"--task.num-workers is {workers}, and workers need Linux or macOS.", "Use --task.num-workers 0."
            )
        layout = layout_of(template._asdict())
        memory = _shared_memory(size_of(layout))  # a file descriptor
        self.table = SharedArrays(**lay_out(layout, mmap.mmap(memory, 0), slice(None)))
        self._id, self._workers = id, list[EnvWorker]()
        self._shutdown = weakref.finalize(self, _shut_down, self._workers)
        settings = {
            "id": id,
            "options": options,
            "layout": layout,
            "workers": workers,
            # The signal is sent when the thread that started a worker ends, so only the main thread requests it.
            "die_with_parent": threading.current_thread() is threading.main_thread(),
        }
        body, numbers = json.dumps(settings).encode(), range(workers)
        try:
            for number in numbers:
                indices = _format_indices(env_indices[number::workers])
                name = f"Worker {number} of {workers}, with the environments {indices} of {id},"
                self._workers.append(EnvWorker(name, memory))
            self._request({number: Message(Request.SETTINGS, number, body) for number in numbers})
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(memory)
        self._step = {number: Message(Request.STEP) for number in numbers}

    @property
    def reseeded(self) -> np.ndarray:
        return ended_rows(self.table)

    def begin(self, seeds: Mapping[int, int]) -> None:
        self._request_rows(Request.BEGIN, seeds)

    def step(self) -> None:
        self._request(self._step)

    def replay(self, episodes: Mapping[int, np.ndarray]) -> set[int]:
        responses = self._request_rows(Request.REPLAY, episodes)
        count = len(self._workers)
        return {index * count + worker for worker, response in responses.items() for index in json.loads(response.body)}

    def render_text(self, row: int) -> str:
        return self._request_row(Request.TEXT, row).decode()

    def render(self, row: int) -> np.ndarray:
        return unpack(self._request_row(Request.FRAME, row))[0]

    def close(self) -> None:
        self._shutdown()

    def _request_row(self, kind: bytes, row: int) -> bytes:
        index, worker = divmod(row, len(self._workers))
        return self._request({worker: Message(kind, index)})[worker].body

    def _request_rows(self, kind: bytes, values: Mapping[int, Any]) -> dict[int, Message]:
        """Send a value for each of some rows to the workers that hold these rows."""
        by_worker: dict[int, dict[int, Any]] = {}
        for row, value in values.items():
            index, worker = divmod(row, len(self._workers))
            by_worker.setdefault(worker, {})[index] = value
        return self._request({worker: Message(kind, body=pack(rows)) for worker, rows in by_worker.items()})

    def _request(self, requests: Mapping[int, Message]) -> dict[int, Message]:
        """Send requests to some workers, which run in parallel, and wait for all responses."""
        if not self._shutdown.alive:
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
        self._shutdown()


def _shut_down(workers: Sequence[EnvWorker]) -> None:
    """Let workers close their environments and exit; kill those that do not."""
    for worker in workers:
        worker.channel.close()
    deadline = time.monotonic() + EXIT_TIMEOUT
    for worker in workers:
        worker.wait(deadline - time.monotonic())


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


def _format_indices(indices: Sequence[int]) -> str:
    texts = [str(index) for index in indices]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:3], "...", texts[-1]])
