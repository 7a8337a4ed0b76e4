"""A reader: a process of its own that reads examples for a loader, and both ends of the line between them.

A reader is a fresh Python, not a fork: a process that has started threads cannot be forked safely. It builds the data
set from its settings, takes row numbers on its standard input and answers with tensors in safetensors' form. It ends
when nobody is left to ask.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load, save

from lockstep.config import ConfigError, apply_overrides, as_dict
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves

PATIENCE = 5.0
"""Seconds for a reader to end before it is killed."""


class ReaderError(RuntimeError):
    """A reader died: which one, and how."""


class LoaderWorker:
    """A reader process, as its loader sees it."""

    def __init__(self, config: Any, split: str, name: str) -> None:
        self.name = name
        kind = type(config)
        if kind.__module__ == "__main__" or kind.__module__.startswith("recipe_in_"):
            raise ConfigError(
                f"{kind.__name__} is not in a module that a reader, which is a Python of its own, can import.",
                "Put the data set in a module of its own, or use --algo.num-workers 0.",
            )
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.data.dataloader_worker"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._questions, self._answers = self.process.stdin, self.process.stdout
        self._turn = threading.Lock()
        self._end = weakref.finalize(self, _end, self.process)
        settings = {"module": kind.__module__, "name": kind.__qualname__, "values": as_dict(config), "split": split}
        self._send(json.dumps(settings).encode())

    def read(self, rows: np.ndarray) -> dict[str, Any]:
        """The examples of some rows, as the data set itself would give them."""
        with self._turn:
            self._send(rows.astype("<i8").tobytes())
            answer = _receive(self._answers)
        if answer is None:
            code = self.process.wait(PATIENCE)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ReaderError(f"{self.name} {how}; what it wrote to standard error says why.")
        return _unfold(load(answer))

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it has died, as its answer will show
            _send(self._questions, message)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(8, "little"))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message; None when the other end is gone."""
    head = pipe.read(8)
    size = int.from_bytes(head, "little") if len(head) == 8 else 0
    message = pipe.read(size) if size else b""
    return message if size and len(message) == size else None


def _unfold(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tensors under dotted names as the tree they are of."""
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        *branches, leaf = name.split(".")
        place = tree
        for branch in branches:
            place = place.setdefault(branch, {})
        place[leaf] = tensor
    return tree


def main() -> int:
    """Build the data set and read what is asked for, until nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too, but a run that stops takes its last batch
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a data set prints must not come between the answers
    torch.set_num_threads(1)
    told = _receive(sys.stdin.buffer)
    if told is None:
        return 0
    settings = json.loads(told)
    kind = getattr(importlib.import_module(settings["module"]), settings["name"])
    data = apply_overrides(kind(), settings["values"]).build(Lanes(1, range(1), 0), torch.device("cpu"))
    while (rows := _receive(sys.stdin.buffer)) is not None:
        tree = data.read(settings["split"], np.frombuffer(rows, "<i8").copy())
        _send(answers, save({name: tensor.contiguous() for name, tensor in named_leaves(tree).items()}))
    data.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
