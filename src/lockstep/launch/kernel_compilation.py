"""Compile numba kernels once for all workers of a host: the first worker compiles, the others load the result.

Numba keeps compiled kernels in a cache on disk. Without a lock, workers that start together with an empty cache would
each compile every kernel.

Compiling takes from seconds to a minute. It is announced, and timed as a phase of its own.
"""

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lockstep.io.status_line import STARTUP
from lockstep.launch.process_lifetime import launch_directory
from lockstep.launch.world import warn_user
from lockstep.ops.compilation import COMPILE

compiled_kernels: list[str] = []
"""Names of the kernels that this process has compiled. Kernels loaded from the cache are not among them."""
_announced_kernels: list[str] = []
"""Names of the kernels that are being compiled, outermost first."""
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


def announce_compilation(phase: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Announce the first compilation of this process, and time compilations as `phase(COMPILE)`.

    Without that, their time would count as time of the environments that call a kernel first.
    """
    if "numba" not in sys.modules:
        return
    from numba.core import dispatcher

    compiler_class: Any = dispatcher._FunctionCompiler  # type: ignore[attr-defined]  # called only for kernels that the cache does not have
    compile_silently = getattr(compiler_class.compile, "silently", compiler_class.compile)

    def compile_announced(self: Any, args: Any, return_type: Any) -> Any:
        with _announced(self.py_func.__name__, phase):
            return compile_silently(self, args, return_type)

    compile_announced.silently = compile_silently  # type: ignore[attr-defined]
    compiler_class.compile = compile_announced


@contextmanager
def show_status(text: str | Callable[[], str], shown: bool = True) -> Iterator[None]:
    """Show what this process does until the end of the block, and which numba kernel it compiles meanwhile.

    For commands without workers. `shown=False` only announces the first compilation.
    """
    announce_compilation(lambda phase: nullcontext())
    if shown:
        STARTUP.start(text)
    try:
        yield
    finally:
        STARTUP.stop()


@contextmanager
def _announced(kernel: str, phase: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    if not compiled_kernels and not _announced_kernels:
        warn_user(
            "compiling numba kernels, which takes up to a minute. Later runs load them from a cache. "
            "`lockstep warmup` compiles all kernels ahead."
        )
    text_before = STARTUP.text
    STARTUP.update(f"compiling the numba kernel {kernel}")
    # Phases belong to the main thread. A kernel that another kernel calls is part of the outer compilation.
    is_timed = not _announced_kernels and threading.current_thread() is threading.main_thread()
    _announced_kernels.append(kernel)
    try:
        with phase(COMPILE) if is_timed else nullcontext():
            yield
    finally:
        compiled_kernels.append(_announced_kernels.pop())
        STARTUP.update(text_before)


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
