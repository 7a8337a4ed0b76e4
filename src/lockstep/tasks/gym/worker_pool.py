"""Gymnasium environments in worker processes: the methods of `Rows`, with a table that all of them share.

A worker is a fresh Python, not a fork: a process that has started threads (torch's, CUDA's) cannot be forked safely.
It takes every so many-th row, so that the environments of one lane are replayed by several workers.
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
from itertools import zip_longest
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
    """A worker failed, or died: who it was, how, and its last words."""


class EnvWorker:
    """One worker process, as its parent sees it."""

    def __init__(self, name: str, memory: int) -> None:
        self.name = name
        self.channel, theirs = socket.socketpair()
        # What can be imported here can be imported there; and an environment that computes with torch sums alike.
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
        self._words: deque[str] = deque(maxlen=50)
        self._ear = threading.Thread(target=_listen, args=(self.process.stderr, self._words), daemon=True)
        self._ear.start()

    def send(self, message: Message) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died, as `receive` will find
            send(self.channel, message)

    def receive(self) -> Message:
        """Its answer; raises if it has none to give."""
        answer = receive(self.channel)
        if answer is not None and answer.kind != Response.FAILED:
            return answer
        words = answer.body.decode() if answer else ""
        code = self.await_end(PATIENCE)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = "".join(self._words) + words
        raise WorkerError(f"{self.name} {how}." + (f" Its last words:\n{words.rstrip()}" if words else ""))

    def await_end(self, seconds: float) -> int:
        """Its exit code, or minus the signal that ended it; it is killed when it takes too long."""
        try:
            code = self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._ear.join(1.0)  # not for ever: a process the environment has started may hold the other end
        return code


class WorkerPool:
    """Environments in worker processes; `table` is the memory they share."""

    def __init__(
        self, id: str, options: Mapping[str, Any], forms: SharedArrays, workers: int, places: Sequence[int]
    ) -> None:
        """`forms` is a table like the one to share, and `places` are those of the environments in the whole run."""
        if os.name != "posix":
            raise ConfigError(
                f"--task.num-workers is {workers}, and workers need Linux or macOS.", "Use --task.num-workers 0."
            )
        layout = layout_of(forms._asdict())
        memory = _shared_memory(size_of(layout))  # a file descriptor
        self.table = SharedArrays(**lay_out(layout, mmap.mmap(memory, 0)))
        self._id, self._workers = id, list[EnvWorker]()
        self._end = weakref.finalize(self, _end, self._workers)
        settings = {
            "id": id,
            "options": options,
            "layout": layout,
            "workers": workers,
            # The system's signal comes when the thread that started a worker ends, so only the main one asks for it.
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
        shares: dict[int, list[tuple[int, int]]] = {}
        for row, seed in seeds.items():
            worker, place = self._find(row)
            shares.setdefault(worker, []).append((place, seed))
        self._ask({w: Message(Request.BEGIN, body=pack(np.array(share, np.int64))) for w, share in shares.items()})

    def step(self) -> None:
        self._ask(self._step)

    def replay(self, episodes: Mapping[int, np.ndarray]) -> set[int]:
        shares: dict[int, list[int]] = {}
        for row in episodes:
            shares.setdefault(self._find(row)[0], []).append(row)
        through: set[int] = set()
        for wave in zip_longest(*shares.values()):  # at most one row for each worker
            rows = {self._find(row)[0]: row for row in wave if row is not None}
            orders = {w: Message(Request.REPLAY, self._find(row)[1], pack(episodes[row])) for w, row in rows.items()}
            through |= {rows[worker] for worker, answer in self._ask(orders).items() if answer.number}
        return through

    def render_text(self, row: int) -> str:
        return self._ask_one(Request.TEXT, row).decode()

    def render(self, row: int) -> np.ndarray:
        return unpack(self._ask_one(Request.FRAME, row))

    def close(self) -> None:
        self._end()

    def _find(self, row: int) -> tuple[int, int]:
        """The worker that holds a row, and the row's place there."""
        place, worker = divmod(row, len(self._workers))
        return worker, place

    def _ask_one(self, kind: bytes, row: int) -> bytes:
        worker, place = self._find(row)
        return self._ask({worker: Message(kind, place)})[worker].body

    def _ask(self, orders: Mapping[int, Message]) -> dict[int, Message]:
        """Give orders to some workers, who obey side by side, and await all answers."""
        if not self._end.alive:
            raise WorkerError(f"The workers of {self._id} have ended.")
        try:
            for worker, order in orders.items():
                self._workers[worker].send(order)
            answers = {worker: self._workers[worker].receive() for worker in orders}
        except BaseException:
            # Also on Ctrl-C: an answer that nobody awaited would be taken for that to the next order.
            self._kill()
            raise
        for answer in answers.values():
            if answer.kind == Response.REFUSED:
                raise ConfigError(answer.body.decode())
        return answers

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self._end()


def _end(workers: Sequence[EnvWorker]) -> None:
    """Let workers close their environments and leave; kill those that do not."""
    for worker in workers:
        worker.channel.close()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.await_end(deadline - time.monotonic())


def _shared_memory(size: int) -> int:
    """A file of memory without a name, so that nothing is left of it when its users are gone, however they went."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("lockstep")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory


def _listen(stream: IO[bytes], words: "deque[str]") -> None:
    """Pass on what a worker writes to its stderr, and keep the end of it."""
    with stream:
        for line in stream:
            words.append(line.decode(errors="replace"))
            with suppress(OSError, ValueError):  # ours may be closed
                sys.stderr.write(words[-1])


def _listed(places: Sequence[int]) -> str:
    shown = [str(place) for place in places]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])
