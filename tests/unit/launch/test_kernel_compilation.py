"""Compilation of numba kernels is reported as the compile phase, not as a hang."""

import itertools
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from numba import njit
from numba.core.compiler_lock import global_compiler_lock

from lockstep.cli import main
from lockstep.distributed.process_status import ProcessStatus
from lockstep.distributed.watchdog import COMPILE_TIMEOUT, Watchdog
from lockstep.io.status_line import STARTUP, STATUS_SECONDS
from lockstep.launch.kernel_compilation import announce_compilation, is_compiling_kernel, show_status
from lockstep.ops.compilation import COMPILE


@contextmanager
def compiling():
    """Hold numba's compiler lock in another thread."""
    held, done = threading.Event(), threading.Event()

    def work():
        with global_compiler_lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    held.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture
def status():
    return ProcessStatus(0, 1, torch.device("cpu"), phases=["collect"], phase_counts={"collect": 1})


def test_is_compiling_kernel_while_another_thread_compiles_is_true():
    assert not is_compiling_kernel()
    with compiling():
        assert is_compiling_kernel()
    assert not is_compiling_kernel()


def test_status_phase_while_kernel_compiles_is_compile(status):
    assert status.phase == "collect"
    with compiling():
        assert status.phase == COMPILE


def test_watchdog_while_kernel_compiles_allows_compile_timeout(status, tmp_path):
    watchdog = Watchdog(status, timeout=20.0, max_hours=None)
    watchdog.set_status_dir(tmp_path)
    assert watchdog._allowed(saving=False) == 20.0
    with compiling():
        assert watchdog._allowed(saving=False) == COMPILE_TIMEOUT


def test_compilation_is_announced_and_timed_as_its_own_phase(monkeypatch, capsys):
    monkeypatch.setattr("lockstep.launch.kernel_compilation.compiled_kernels", [])
    entered = []

    @contextmanager
    def phase(name):
        entered.append(name)
        yield

    @njit
    def inner(x):
        return x + 1

    @njit
    def outer(x):
        return inner(x) * 2

    announce_compilation(phase)
    assert outer(3) == outer(3) == 8
    assert entered == [COMPILE]  # once: the inner kernel is part of the outer compilation
    assert capsys.readouterr().err.count("compiling numba kernels") == 1


@pytest.mark.slow  # compiles every kernel
def test_training_with_empty_cache_prints_lines_until_the_first_update(tmp_path):
    settings = [f"run.runs_dir={tmp_path}", "run.name=run", "run.device=cpu", "run.eval_every=none"]
    command = [sys.executable, "-m", "lockstep", "train", "snake-ppo", "--smoke", *settings]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    arrivals, lines = [time.monotonic()], []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout:
            arrivals.append(time.monotonic())
            lines.append(line)
    assert process.returncode == 0, lines
    first = next(index for index, line in enumerate(lines) if " of 4,096 steps " in line)
    gaps = [after - before for before, after in itertools.pairwise(arrivals[: first + 2])]
    assert max(gaps) < max(10 * STATUS_SECONDS, 0.5 * sum(gaps)), lines  # without status lines: one gap is most of it
    announced = next(index for index, line in enumerate(lines) if "compiling numba kernels" in line)
    assert announced < next(index for index, line in enumerate(lines) if "compiling kernels, " in line) < first
    assert " compile " in lines[first]


def test_show_status_names_the_kernel_and_returns_to_its_text(monkeypatch, capsys):
    monkeypatch.setattr("lockstep.launch.kernel_compilation.compiled_kernels", [])
    texts = []

    @njit
    def doubled(x):
        texts_of_compilation()
        return 2 * x

    @njit
    def texts_of_compilation():
        return None

    update = STARTUP.update
    monkeypatch.setattr(STARTUP, "update", lambda text: (update(text), texts.append(STARTUP.text()))[0])
    with show_status("playing 3 episodes"):
        assert doubled(3) == 6
        assert STARTUP.text() == "playing 3 episodes"
    assert "compiling the numba kernel doubled" in texts
    assert capsys.readouterr().err.count("compiling numba kernels") == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", [["eval"], ["eval", "--opponents", "random", "--games", "2"], ["play", "--gif"]])
def test_commands_with_empty_cache_announce_compilation(run_of_team, tmp_path, command):
    words = [command[0], str(run_of_team), *command[1:]]
    words += [str(tmp_path / "game.gif"), "--max-steps", "3"] if command[-1] == "--gif" else []
    words += ["--episodes", "1"] if command == ["eval"] else []
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "compiling numba kernels, which takes up to a minute" in done.stderr
    assert "lockstep: compiling the numba kernel " in done.stderr


@pytest.fixture(scope="module")
def run_of_team(tmp_path_factory):
    directory = tmp_path_factory.mktemp("team")
    assert main(["train", "team-ddpg", "--smoke", "--run.runs-dir", str(directory)]) == 0
    return next(directory.iterdir())
