"""Worker processes of a launcher: forked from its fork server, or started as fresh interpreters.

`start_workers` replaces the function of torch's elastic agent that starts processes. Each worker has its own process
group and a pipe to which it writes its progress.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from lockstep.launch.fork_server import ForkedProcess, ForkServer
from lockstep.launch.process_lifetime import ENV_PROGRESS_FD

KILL_TIMEOUT = 5.0
"""Seconds after SIGKILL within which a process exits, unless it waits for a disk or a device in the kernel."""


class WorkerProcess:
    """One worker, with the attributes of torch's `SubprocessHandler`."""

    def __init__(
        self, server: ForkServer | None, arguments: Sequence[str], environment: dict[str, str], output: Sequence[str]
    ) -> None:
        self.proc: ForkedProcess | subprocess.Popen[bytes]
        self.progress, write_end = os.pipe()
        os.set_blocking(self.progress, False)
        environment = os.environ | environment
        files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC) for path in output]
        try:
            if server is not None:
                self.proc = server.start(arguments, environment, files, write_end)
            else:
                self.proc = subprocess.Popen(
                    [sys.executable, "-P", "-m", "lockstep", *arguments],
                    env=environment | {ENV_PROGRESS_FD: str(write_end)},
                    pass_fds=[write_end],
                    stdout=files[0] if files else None,
                    stderr=files[1] if files else None,
                    start_new_session=True,
                )
        finally:
            for descriptor in (write_end, *files):
                os.close(descriptor)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the process group of this worker."""
        if not self.proc.pid:  # never started; group 0 would be the launcher's own
            return
        with suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


class Workers(SubprocessContext):
    """The workers of one attempt, with the interface that torch's agent uses."""

    def __init__(self, server: ForkServer | None, **settings: Any) -> None:
        super().__init__(**settings)
        self._server = server
        self.workers: dict[int, WorkerProcess] = {}
        self.subprocess_handlers: Any = self.workers  # the attribute that torch reads

    def _start(self) -> None:
        for rank in range(self.nprocs):
            output = [path for path in (self.stdouts[rank], self.stderrs[rank]) if path]
            self.workers[rank] = WorkerProcess(self._server, self.args[rank], self.envs[rank], output)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        # A process that does not exit after SIGKILL waits in the kernel for a disk or a device. Do not wait for it.
        super()._close(death_sig, min(timeout, int(KILL_TIMEOUT)))
        for worker in self.workers.values():
            if worker.progress >= 0:
                os.close(worker.progress)
                worker.progress = -1


def start_workers(server: ForkServer | None, **settings: Any) -> PContext:
    """Start workers; takes the arguments of torch's `start_processes`."""
    names = ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes")
    workers = Workers(server, **{name: settings[name] for name in names})
    workers.start()
    return workers
