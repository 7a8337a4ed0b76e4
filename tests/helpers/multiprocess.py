"""Start real processes with a time limit, so that a hang is a failed test with stacks, not a stuck job.

`together` runs a function of a test module on N processes that can find each other, as a launcher would start them.
They are forked from a server that has imported torch and lockstep, so a test on four processes takes a second.
`command` runs a command line as a user types it; `python -m lockstep` is forked from the same server, unless
`fresh=True`.

    def agreed(flag):                                       # at the top of a test module
        with Runtime.start(RunConfig(lanes=8)) as runtime:
            return runtime.all_reduce_any(flag=runtime.rank == flag)

    together(agreed, 4, 2)                                  # [{"flag": True}] * 4, by process
"""

import atexit
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

SECONDS = 240.0
"""Time limit of a group: many times what it needs on a busy machine."""

_IMPORTED = [
    "pytest",
    "psutil",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.tensorboard",
    "torch._dynamo",  # imported by torch.optim, which some tests compare with ours
    "lockstep.training_loop",
    "lockstep.cli.prove",
    "lockstep.cli.resume",
    "lockstep.recipes.cricket_gnn",
    "lockstep.recipes.gym_ppo",
    "lockstep.recipes.snake_ppo",
    "helpers.warm_numba_cache",
    "helpers.frozen_objects",
]
"""Modules that the server imports, so that forked processes do not have to."""

# A server instead of a fork of the test process: the server has one thread, whatever other tests have started.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_IMPORTED)


class Hung(AssertionError):
    """Processes did not end in time; the message has the stacks of each."""


class Failed(AssertionError):
    """A process that should have succeeded failed."""


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    process: int
    value: Any
    """Return value of its function after a JSON round trip; None if it failed."""
    error: str
    """`Kind: message` of its exception, or the signal that ended it; empty on success."""
    output: str
    """Standard output and error."""


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    output: str
    """Standard output and error."""


def together(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    seconds: float = SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a function on several processes; return their values, or raise Failed with all tracebacks if one fails."""
    ended = outcomes(function, processes, *arguments, seconds=seconds, environment=environment)
    if any(outcome.error for outcome in ended):
        raise Failed("\n".join(_describe(outcome) for outcome in ended))
    return [outcome.value for outcome in ended]


def outcomes(
    function: Callable[..., Any],
    processes: int,
    *arguments: Any,
    seconds: float = SECONDS,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run a function that may fail on several processes; return the outcome of each."""
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as scratch:
        places = [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                **(environment or {}),
            }
            for port in [free_port()]
            for rank in range(processes)
        ]
        folders = [Path(scratch) / str(rank) for rank in range(processes)]
        workers = []
        _start_server()
        try:
            for place, folder in zip(places, folders, strict=True):
                folder.mkdir()
                worker = _context.Process(target=_work, args=(function, arguments, place, folder), daemon=True)
                worker.start()
                workers.append(worker)
            deadline = time.monotonic() + seconds
            waiting = [worker.sentinel for worker in workers]
            while waiting and (left := deadline - time.monotonic()) > 0:
                ended = connection.wait(waiting, left)
                waiting = [sentinel for sentinel in waiting if sentinel not in ended]
            alive = [worker.pid for worker in workers if worker.is_alive()]
        finally:
            _end([worker.pid for worker in workers if worker.is_alive()])
            for worker in workers:
                worker.join()
        found = [
            _read(rank, folder, worker.exitcode)
            for rank, (folder, worker) in enumerate(zip(folders, workers, strict=True))
        ]
    if alive:
        raise Hung(f"not over after {seconds:.0f} s\n" + "\n".join(_describe(outcome) for outcome in found))
    return found


def command(
    words: Sequence[str | Path],
    *,
    directory: Path | None = None,
    seconds: float = SECONDS,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Finished:
    """Run a command line to its end; raise Hung with the stacks of it and its children if it takes too long.

    `fresh` starts a new interpreter also for lockstep, for tests of imports.
    """
    words = [str(word) for word in words]
    surroundings = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    surroundings |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    surroundings |= dict(environment or {})
    with tempfile.NamedTemporaryFile("w+") as output:
        process: Any
        if not fresh and words[:3] == [sys.executable, "-m", "lockstep"] and _is_as_at_import(surroundings):
            _start_server()
            process = _context.Process(target=_be_command, args=(words[3:], directory, surroundings, output.name))
            process.start()
            wait = process.join
        else:
            process = subprocess.Popen(
                words,
                cwd=directory,
                env=surroundings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            wait = process.wait
        hung = False
        try:
            wait(seconds)
            hung = _code(process) is None
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            if _code(process) is None:
                children = psutil.Process(process.pid).children(recursive=True)
                _end([child.pid for child in children] + [process.pid])
            wait()
        output.seek(0)
        text = output.read()
    if hung:
        raise Hung(f"not over after {seconds:.0f} s: {' '.join(words)}\n{text}")
    code = _code(process)
    assert code is not None
    return Finished(code, text)


def _is_as_at_import(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment would have the same imports as the server."""
    from lockstep.launch.fork_server import read_at_import

    def chosen(values: Mapping[str, str]) -> dict[str, str]:
        free = ("PYTHONUNBUFFERED", "EMULATED_GPUS")
        return {name: value for name, value in read_at_import(values).items() if name not in free}

    server = dict(os.environ)
    if _emulated_gpus:
        server["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_EMULATED), server.get("PYTHONPATH")]))
    elif "EMULATED_GPUS" in environment:
        return False
    return chosen(environment) == chosen(server) and environment["OMP_NUM_THREADS"] == "1"


def _be_command(words: list[str], directory: Path | None, environment: dict[str, str], output: str) -> None:
    """In a fork of the server: continue as `python -m lockstep WORDS` after its imports."""
    _redirect(Path(output))
    if not environment.get("PYTHONFAULTHANDLER"):
        faulthandler.disable()
    os.environ.clear()
    os.environ.update(environment)
    if directory is not None:
        os.chdir(directory)
    from lockstep import cli

    sys.argv = [str(Path(cli.__file__).parents[1] / "__main__.py"), *words]
    sys.path.remove(str(Path(__file__).parents[1]))  # the server needs it, a command does not have it
    try:
        code: Any = cli.main()
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # Do what the interpreter does at exit, because multiprocessing skips it.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _redirect(output: Path) -> None:
    """Redirect standard output and error to a file, including the stacks when a time limit ends the process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable(sys.stderr)


def _code(process: Any) -> int | None:
    """Return the exit code of a process of `subprocess` or `multiprocessing`; None while it runs."""
    code: int | None = process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
    return code


_EMULATED = Path(__file__).parents[1] / "emulated_cuda" / "site"
_emulated_gpus = False


def use_emulated_gpus(wanted: bool) -> None:
    """Fork processes from a server whose torch has emulated CUDA devices, or from one without.

    A process has as many devices as EMULATED_GPUS in its environment says, by default none.
    """
    global _emulated_gpus
    if wanted != _emulated_gpus:
        multiprocessing.forkserver._forkserver._stop()  # the next server is started with the new setting
        _emulated_gpus = wanted


def _start_server() -> None:
    """Start the server if it does not run. It lives as long as the tests and keeps its environment: one thread, and
    the tests directory at the front of PYTHONPATH."""
    places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"OMP_NUM_THREADS": "1"}
    if _emulated_gpus:
        places.insert(0, str(_EMULATED))
        settings["EMULATED_GPUS"] = "0"
    with patch.dict(os.environ, settings, PYTHONPATH=os.pathsep.join(places)):
        multiprocessing.forkserver.ensure_running()


def _work(function: Callable[..., Any], arguments: tuple[Any, ...], place: dict[str, str], folder: Path) -> None:
    """In a worker process: set the environment variables of its rank, run the function, write the result."""
    _redirect(folder / "output")
    os.environ.update(place)
    try:
        answer = {"value": function(*arguments)}
        text = json.dumps(answer)
    except BaseException as error:
        traceback.print_exc()
        text = json.dumps({"error": f"{type(error).__name__}: {error}"})
    beside = folder / "answer.partial"
    beside.write_text(text)
    beside.rename(folder / "answer")
    sys.stdout.flush()
    os._exit(0)  # a thread left by a failed collective must not keep the process alive


def _read(process: int, folder: Path, code: int | None) -> Outcome:
    output = (folder / "output").read_text() if (folder / "output").exists() else ""
    if (folder / "answer").exists():
        answer = json.loads((folder / "answer").read_text())
        return Outcome(process, answer.get("value"), answer.get("error", ""), output)
    ending = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
    return Outcome(process, None, f"ended by {ending}", output)


def _describe(outcome: Outcome) -> str:
    return f"-- process {outcome.process}: {outcome.error or 'ended well'}\n{outcome.output}".rstrip()


def _end(processes: Sequence[int | None]) -> None:
    """Send SIGABRT to all processes for their stacks, then SIGKILL to those that remain."""
    known = [psutil.Process(pid) for pid in processes if pid is not None and psutil.pid_exists(pid)]
    for sign in (signal.SIGABRT, signal.SIGKILL):
        for process in known:
            try:
                process.send_signal(sign)
            except psutil.NoSuchProcess:
                continue
        _, known = psutil.wait_procs(known, timeout=5)


def free_port() -> str:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
