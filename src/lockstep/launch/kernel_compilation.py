"""Compile numba kernels once for all workers of a host: the first worker compiles, the others load the result.

Numba keeps compiled kernels in a cache on disk. Without a lock, workers that start together with an empty cache would
each compile every kernel.
"""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.launch.process_lifetime import launch_directory

_depth = 0
"""Depth of nested compilations in this process. Compiling a kernel also compiles the kernels that it calls."""


def share_compilation() -> None:
    """Hold a lock shared by all workers of our launcher during the first compilation of each cached kernel."""
    if launch_directory() is None or "numba" not in sys.modules:
        return
    from numba.core import dispatcher
    from numba.core.compiler_lock import global_compiler_lock

    dispatcher_class: Any = dispatcher.Dispatcher
    compile_unlocked = dispatcher_class.compile
    if hasattr(compile_unlocked, "shared"):
        return

    def compile_once(self: Any, signature: Any) -> Any:
        # Acquire numba's own lock first: nested compilations use the same order, which avoids deadlocks.
        with global_compiler_lock, _lock(not _is_cached(self)):
            return compile_unlocked(self, signature)

    compile_once.shared = True  # type: ignore[attr-defined]
    dispatcher_class.compile = compile_once


def is_compiling_kernel() -> bool:
    """Return whether another thread of this process compiles a numba kernel, which may take minutes."""
    module = sys.modules.get("numba.core.compiler_lock")
    if module is None:
        return False
    lock = module.global_compiler_lock._lock  # numba's is_locked() considers the calling thread only
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def _is_cached(kernel: Any) -> bool:
    """Return whether a kernel was compiled before, or does not use a cache."""
    path = getattr(getattr(kernel._cache, "_cache_file", None), "_index_path", None)
    return path is None or os.path.exists(path)


@contextmanager
def _lock(needed: bool) -> Iterator[None]:
    global _depth
    shared = launch_directory()
    if not needed or _depth or shared is None:
        yield
        return
    descriptor = os.open(shared / "compiling", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _depth += 1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _depth -= 1
        os.close(descriptor)
