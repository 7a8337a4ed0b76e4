"""Compile the numba kernels ahead in a separate process, with `lockstep warmup`."""

import os
import subprocess
import sys
from collections.abc import Callable

from lockstep.launch.process_lifetime import ENV_PARENT_PID
from lockstep.tools.doctor.finding import CheckResult, failure, ok


def check_kernels(progress: Callable[[str], None]) -> CheckResult:
    """Compile all kernels that are not in the cache. `progress` receives every line of output."""
    command = [sys.executable, "-P", "-m", "lockstep", "warmup"]
    environment = os.environ | {ENV_PARENT_PID: str(os.getpid())}
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout or ():
            lines.append(line.strip())
            progress(f"compiling numba kernels: {lines[-1]}")
    last = lines[-1] if lines else "no output"
    if process.returncode:
        return failure(
            "kernels", f"numba kernels cannot be compiled: {last}", "Run `lockstep warmup` for all messages."
        )
    return ok("kernels", last)
