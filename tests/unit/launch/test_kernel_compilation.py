"""Compilation of numba kernels is reported as the compile phase, not as a hang."""

import threading
from contextlib import contextmanager

import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock

from lockstep.distributed.process_status import ProcessStatus
from lockstep.distributed.watchdog import COMPILE_TIMEOUT, Watchdog
from lockstep.launch.kernel_compilation import is_compiling_kernel
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
