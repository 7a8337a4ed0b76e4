"""Process of a submission, `python submission_server.py FILE`: plays the games of one file of the platform's form.

Each game is played by a fork of this process, which executes the file again. Nothing of a game (module variables,
random state, imported modules) reaches the next game.

The process reads requests from standard input and writes responses to standard output, one JSON object per line:
{"seed": 1} starts a game, {"observation": {...}} asks for the action of one snake, {"end": true} ends the game. It may
run under another Python than Lockstep, from 3.7 on, and imports nothing of Lockstep.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import random
import re
import signal
import sys
from typing import Any

PRELOADED = ("numpy", "torch")
"""Packages that are imported once, before games, if the file names them. An import of torch takes seconds."""
_PR_SET_PDEATHSIG = 1


class Discrete:
    """Action space of a snake, as submissions read it."""

    n = 4

    def sample(self) -> int:
        return random.randrange(self.n)


def main() -> int:
    file, parent = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    requests, responses = os.dup(0), os.dup(1)
    # A submission may print: its standard output must not be that of responses.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the process that plays the game ends this one
    if parent:
        _die_with(parent)
    # The file may import its neighbors, and nothing from the directory of this module.
    sys.path[0], sys.dont_write_bytecode = os.path.dirname(file), True
    _preload(file)
    while True:
        request = _receive(requests)
        if request is None:
            return 0
        own_pid = os.getpid()
        os.ftruncate(2, 0)  # standard error is a file: drop the output of the last game
        os.lseek(2, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            _die_with(own_pid)
            _play(file, int(request["seed"]), requests, responses)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            return 128 + os.WTERMSIG(status)
        if os.WEXITSTATUS(status):
            return os.WEXITSTATUS(status)


def _play(file: str, seed: int, requests: int, responses: int) -> None:
    """Play one game, then exit."""
    code = 1
    try:
        _seed(seed)
        seeded = set(sys.modules)
        module = _load(file)
        if any(name in sys.modules and name not in seeded for name in PRELOADED):
            _seed(seed)
        _send(responses, {})
        while True:
            request = _receive(requests)
            if request is None or "end" in request:
                break
            # JSON has no integers as keys.
            observation = {int(key) if key.isdigit() else key: value for key, value in request["observation"].items()}
            action = module.my_controller(observation, [Discrete()], False)
            _send(responses, {"action": [[int(value) for value in part] for part in action]})
        code = 0
        _send(responses, {})
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _load(file: str) -> Any:
    """Execute the file as the module `submission`."""
    spec = importlib.util.spec_from_file_location("submission", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = sys.modules["submission"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _preload(file: str) -> None:
    with open(file, encoding="utf-8", errors="replace") as text:
        named = set(re.findall(r"^\s*(?:import|from)\s+(\w+)", text.read(), re.MULTILINE))
    for name in PRELOADED:
        if name in named:
            with contextlib.suppress(ImportError):  # the file reports it, or does without
                importlib.import_module(name)


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _die_with(parent: int) -> None:
    """Make Linux kill this process when its parent dies, also in the middle of a decision."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def _receive(requests: int) -> dict[str, Any] | None:
    """Return the next request, or None at the end. Its sender waits for the response, so no other one follows it."""
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(requests, 1 << 16)
        if not part:
            return None
        data += part
    request: dict[str, Any] = json.loads(data.decode())
    return request


def _send(responses: int, response: dict[str, Any]) -> None:
    os.write(responses, json.dumps(response).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
