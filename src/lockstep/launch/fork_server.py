"""Fork server: one process with torch and lockstep imported, from which a launcher forks its workers.

The server has one thread and no CUDA context, so forking it is safe. A forked worker gets its own environment, working
directory, output and arguments, and then continues in `lockstep.cli.main` like a fresh interpreter.

The launcher and the server exchange JSON messages over a socket pair. A process that has ended stays a zombie until the
launcher has read its exit status, so that the launcher never signals a reused pid.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.launch.process_lifetime import ENV_LAUNCH_DIR, ENV_PROGRESS_FD, die_with_parent
from lockstep.launch.world import STOP_SIGNALS

START = "LOCKSTEP_START"
"""`spawn` in this environment variable starts every worker as a fresh interpreter."""
KILLED = "the fork server was killed"
_HEADER = struct.Struct("!I")
_AT_IMPORT = (
    "PYTHON",
    "LD_",
    "NUMBA_",
    "MKL_",
    "OPENBLAS_",
    "GOMP_",
    "KMP_",
    "ATEN_",
    "EMULATED_",
    "MUJOCO_",
    "PYOPENGL",
)
"""Prefixes of variables that are read while modules are imported. A server serves workers with equal values only."""
WORKER_VARIABLES = (ENV_LAUNCH_DIR, ENV_PROGRESS_FD, "RANK", "TORCHELASTIC_RUN_ID")
"""Variables removed from the server's environment, because they would mark the server itself as a worker."""
_server: "ForkServer | None" = None


@dataclass
class ForkedProcess:
    """A worker forked by the server, with the methods of `subprocess.Popen` that torch's agent uses."""

    server: "ForkServer"
    pid: int
    """0 if the server was killed before it could fork the worker."""
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.server.read_exits()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


@dataclass
class ForkServer:
    """The launcher's end of a server."""

    channel: socket.socket
    pid: int
    environment: dict[str, str]
    """Variables that were read at import, with their values then."""
    problem: str | None = None
    """Why forking is unsafe; None before the server has answered, empty if forking is safe."""
    _processes: dict[int, ForkedProcess] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def wait_until_ready(self) -> str:
        """Wait until the server has imported everything. Return why forking is unsafe, or an empty string."""
        with self._lock:
            if self.problem is None:
                message, _ = _receive(self.channel)
                self.problem = "the fork server ended while it started" if message is None else str(message["problem"])
            return self.problem

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: Sequence[int], progress: int
    ) -> ForkedProcess:
        """Fork a worker that runs `lockstep ARGUMENTS`.

        `output`: descriptors for its standard output and error; empty to share those of the launcher. `progress`: the
        descriptor to which it writes its progress.
        """
        request = {"words": list(arguments), "environment": dict(environment), "directory": os.getcwd()}
        with self._lock:
            with suppress(ConnectionError):
                _send(self.channel, request, [progress, *output])
                while (message := _receive(self.channel)[0]) is not None:
                    if "pid" in message:
                        process = self._processes[message["pid"]] = ForkedProcess(self, message["pid"])
                        return process
                    self._note_exit(message)
            # The server was killed. Report a killed worker, so that the launcher restarts all workers.
            self._note_killed()
            return ForkedProcess(self, 0, -signal.SIGKILL)

    def read_exits(self) -> None:
        """Read which workers have exited."""
        with self._lock:
            while self._processes and select.select([self.channel], [], [], 0)[0]:
                message, _ = _receive(self.channel)
                if message is None:
                    self._note_killed()
                else:
                    self._note_exit(message)

    def _note_killed(self) -> None:
        """Mark all workers as killed, because the kernel kills them with their server."""
        for process in self._processes.values():
            process.returncode = -signal.SIGKILL
        self._processes.clear()
        self.problem = KILLED

    def _note_exit(self, message: dict[str, Any]) -> None:
        process = self._processes.pop(message["ended"], None)
        if process is not None:
            process.returncode = message["code"]
            with suppress(ConnectionError):  # the server was killed
                _send(self.channel, {"reap": process.pid})

    def close(self) -> None:
        """End the server and every remaining worker."""
        self.channel.close()


# -- the launcher ------------------------------------------------------------------------------------------------------


def fork_here(imports: Callable[[], None]) -> list[str] | None:
    """Fork a server from this process, which has imported torch and done nothing else.

    The server calls `imports` for the other modules that workers need, while the launcher continues.

    Returns:
        None in the launcher. In a worker that the server forks later, the arguments of the worker.
    """
    global _server
    if why_unsafe():
        return None  # `obtain` starts a separate server, which reports the reason if it applies there, too
    launcher_end, server_end = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    launcher, pid = os.getpid(), os.fork()
    if pid:
        server_end.close()
        _server = ForkServer(launcher_end, pid, read_at_import(os.environ))
        return None
    launcher_end.close()
    die_with_parent()
    if os.getppid() != launcher:
        os._exit(0)
    return serve(server_end, imports)


def obtain(environment: Mapping[str, str]) -> "ForkServer | str":
    """Return the server of this process, starting it if needed, or the reason why workers must start without one.

    The reason is empty if the user disabled the server.
    """
    global _server
    if os.environ.get(START) == "spawn":
        return ""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return "this system is not Linux 5.3 or newer"
    at_import = read_at_import(environment)
    if _server is not None:
        _server.read_exits()
    if _server is None or _server.environment != at_import or _server.problem == KILLED:
        if _server is not None:
            _server.close()
        _server = _spawn(environment, at_import)
    problem = _server.wait_until_ready()
    return problem or _server


def _spawn(environment: Mapping[str, str], at_import: dict[str, str]) -> ForkServer:
    """Start a server as a separate process, for a launcher that has threads or other state."""
    launcher_end, server_end = socket.socketpair()
    with server_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep", "--fork-server", str(server_end.fileno())],
            env={name: value for name, value in environment.items() if name not in WORKER_VARIABLES},
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    process.returncode = 0  # it exits when the launcher's end of the socket closes; Popen must not wait for it
    return ForkServer(launcher_end, process.pid, at_import)


def why_unsafe() -> str:
    """Return why this process cannot be forked safely; empty if it can."""
    import torch

    if torch.cuda.is_initialized() or getattr(torch.cuda, "_is_in_bad_fork", bool)():
        return "CUDA was used before the workers were started"
    deadline = time.monotonic() + 0.5  # the thread of a progress display may be about to end
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return "importing the modules of the workers has started threads"
        time.sleep(0.01)
    return ""


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that take effect only when modules are imported."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_IMPORT) and name not in ("OPENBLAS_NUM_THREADS", "PYTHONFAULTHANDLER")
    }


# -- the server --------------------------------------------------------------------------------------------------------


def serve(channel: socket.socket, imports: Callable[[], None]) -> list[str]:
    """Fork workers on request until the launcher closes the channel. Return only in a worker, with its arguments."""
    with suppress(PermissionError):  # raised if the server was already started in its own session
        os.setsid()  # terminal signals must not reach the server and its workers
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by the workers
    try:
        imports()
        problem = why_unsafe()
    except Exception as error:
        problem = f"importing the modules of the workers failed: {type(error).__name__}: {error}"
    gc.freeze()  # a garbage collection would write to every page that workers share
    _answer(channel, {"problem": problem})
    server = os.getpid()
    children: dict[int, int] = {}  # pids by pidfd
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                _report_exit(channel, children.pop(descriptor))
                continue
            request, descriptors = _receive(channel)
            if request is None:
                os._exit(0)  # the launcher has exited; the kernel kills the workers
            if "reap" in request:
                os.waitpid(request["reap"], 0)
                continue
            ready_read, ready_write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()  # own process group, and own share of the CPU
                for inherited in (*children, channel.detach(), ready_read, ready_write):
                    os.close(inherited)
                return _become_worker(request, descriptors, server)
            for passed in (ready_write, *descriptors):
                os.close(passed)
            os.read(ready_read, 1)  # returns once the worker has its session, so that its group can be signaled
            os.close(ready_read)
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            _answer(channel, {"pid": pid})


def _report_exit(channel: socket.socket, pid: int) -> None:
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    _answer(channel, {"ended": pid, "code": code})


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    try:
        _send(channel, message)
    except OSError:
        os._exit(0)


def _become_worker(request: dict[str, Any], descriptors: list[int], server: int) -> list[str]:
    """Give this fork of the server the environment, directory, output and arguments of a fresh worker."""
    die_with_parent()
    if os.getppid() != server:
        os._exit(0)
    progress, *output = descriptors
    threads_at_import = os.environ.get("OMP_NUM_THREADS")
    for target, descriptor in zip((1, 2), output, strict=False):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ[ENV_PROGRESS_FD] = str(progress)
    os.chdir(request["directory"])
    sys.argv = [str(Path(__file__).parents[1] / "__main__.py"), *request["words"]]
    _apply_import_settings(threads_at_import)
    return list(request["words"])


def _apply_import_settings(threads_at_import: str | None) -> None:
    """Apply variables that torch and OpenBLAS read at import, which happened in the server."""
    import numpy as np
    import torch
    import torch.distributed as dist

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) and threads != threads_at_import:
        torch.set_num_threads(min(int(threads), torch.get_num_threads()))  # torch uses at most one thread per core
    blas = os.environ.get("OPENBLAS_NUM_THREADS", threads)
    if blas.isdigit() and (count := min(int(blas), len(os.sched_getaffinity(0)))) > 1:
        set_openblas_threads(count)
    dist.set_debug_level_from_env()
    np.random.seed()  # from the OS, so that user environments draw different numbers in each worker


def set_openblas_threads(count: int) -> None:
    """Set the number of threads of the OpenBLAS that is bundled with NumPy."""
    maps = Path("/proc/self/maps").read_text()
    for path in {line.split()[-1] for line in maps.splitlines() if "openblas" in line and line.endswith(".so")}:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(count))
                break


# -- messages ----------------------------------------------------------------------------------------------------------


def _send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    text = json.dumps(message).encode()
    header = _HEADER.pack(len(text))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
    else:
        channel.sendall(header)
    channel.sendall(text)


def _receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive the next message and its descriptors; None when the other end is closed."""
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, 3)
        while header and len(header) < _HEADER.size:
            header += channel.recv(_HEADER.size - len(header))
        if not header:
            return None, []
        (size,) = _HEADER.unpack(header)
        text = bytearray()
        while len(text) < size:
            part = channel.recv(size - len(text))
            if not part:
                return None, []
            text += part
    except ConnectionError:
        return None, []
    return json.loads(text), list(descriptors)
