"""Data worker: a process that reads examples for a data loader, and the pipe protocol between them.

A worker is a new Python process, not a fork, because a process with threads cannot be forked safely. It builds the data
set from its settings, receives row numbers on standard input and answers with tensors in safetensors format. It exits
when its standard input is closed.
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

EXIT_TIMEOUT = 5.0
"""Seconds for a worker to exit before it is killed."""


class ReaderError(RuntimeError):
    """A data worker died. The message names the worker and its signal or exit code."""


class LoaderWorker:
    """Handle of a data worker process."""

    def __init__(self, config: Any, split: str, name: str) -> None:
        self.name = name
        cls = type(config)
        if cls.__module__ == "__main__" or cls.__module__.startswith("recipe_in_"):
            raise ConfigError(
                f"{cls.__name__} is not in a module that a data worker, a separate Python process, can import.",
                "Move the data set to a separate module, or use --algo.num-workers 0.",
            )
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep.data.dataloader_worker"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._responses = self.process.stdin, self.process.stdout
        self._lock = threading.Lock()
        self._terminate = weakref.finalize(self, _terminate, self.process)
        settings = {"module": cls.__module__, "name": cls.__qualname__, "values": as_dict(config), "split": split}
        self._send(json.dumps(settings).encode())

    def read(self, rows: np.ndarray) -> dict[str, Any]:
        """Read the examples of some rows, with the same result as `Dataset.read`."""
        with self._lock:
            self._send(rows.astype("<i8").tobytes())
            response = _receive(self._responses)
        if response is None:
            code = self.process.wait(EXIT_TIMEOUT)
            cause = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ReaderError(f"{self.name} {cause}. See its output on standard error for the cause.")
        return _unflatten(load(response))

    def _send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # the worker has died; reading its response reports that
            _send(self._requests, message)


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    try:
        process.wait(EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(8, "little"))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; None if the other end is closed."""
    header = pipe.read(8)
    size = int.from_bytes(header, "little") if len(header) == 8 else 0
    message = pipe.read(size) if size else b""
    return message if size and len(message) == size else None


def _unflatten(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rebuild a nested dict from tensors with dotted names."""
    tree: dict[str, Any] = {}
    for name, tensor in flat.items():
        *branches, leaf = name.split(".")
        node = tree
        for branch in branches:
            node = node.setdefault(branch, {})
        node[leaf] = tensor
    return tree


def main() -> int:
    """Build the data set and answer read requests until standard input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches this process; a stopping run still reads a batch
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a data set prints must not mix with the responses
    torch.set_num_threads(1)
    message = _receive(sys.stdin.buffer)
    if message is None:
        return 0
    settings = json.loads(message)
    cls = getattr(importlib.import_module(settings["module"]), settings["name"])
    data = apply_overrides(cls(), settings["values"]).build(Lanes(1, range(1), 0), torch.device("cpu"))
    while (rows := _receive(sys.stdin.buffer)) is not None:
        tree = data.read(settings["split"], np.frombuffer(rows, "<i8").copy())
        _send(responses, save({name: tensor.contiguous() for name, tensor in named_leaves(tree).items()}))
    data.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
