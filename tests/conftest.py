"""What all tests share: signals, how hypothesis searches, where data is kept, and torch's settings, which exact mode
changes."""

import os
import signal

import pytest
import torch
from hypothesis import settings

# A deadline is an absolute time, and a first call compiles or imports; a failure must be easy to repeat.
settings.register_profile("lockstep", deadline=None, print_blob=True)
settings.load_profile("lockstep")

# Tests talk to nobody but this machine.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

# LOCKSTEP_INJECT_FAULT has an effect only with it.
os.environ["LOCKSTEP_FAULT_INJECTION"] = "1"

# A shell starts background jobs with SIGINT ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
_MASK = signal.pthread_sigmask(signal.SIG_BLOCK, [])
_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(autouse=True)
def _signals_as_they_were():
    """Undo what a training command leaves: it blocks stop signals until its process exits.

    Module-scoped fixtures run such commands before this one starts, so the state is that of the start of pytest.
    """
    _restore_signals()
    yield
    _restore_signals()


def _restore_signals():
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK)


@pytest.fixture(autouse=True)
def _torch_as_it_was():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
