"""`lockstep warmup`: compile all numba kernels ahead, so that the first run starts at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.cli.parser import parse_args
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.io.printable import print_line


@dataclass(frozen=True)
class Warmup:
    """Compile all numba kernels into their cache, so that no run has to. Takes a minute or two.

    The cache is a directory of the package, a directory of the user if that is read-only, or NUMBA_CACHE_DIR.
    """


def run(arguments: Sequence[str]) -> int:
    parse_args(Warmup, arguments, "lockstep warmup")
    import_torch_with_status("lockstep.training_loop")

    from lockstep.io.status_line import STARTUP
    from lockstep.launch.kernel_compilation import compiled_kernels
    from lockstep.tools.warmup import cache_directory, warm_up

    start = time.perf_counter()
    STARTUP.start("starting")
    try:
        warm_up(print_line)
    finally:
        STARTUP.stop()
    result = f"Compiled {len(compiled_kernels)} kernels" if compiled_kernels else "All kernels were in the cache"
    print_line(f"{result} ({time.perf_counter() - start:.0f} s): {cache_directory()}")
    return 0
