"""Launcher of the processes on this host, based on torch's elastic agent.

The agent restarts all processes when one dies. This module adds to it:
- It forwards signals to the workers as a request to save and stop.
- It reports which process failed first and why.
- It kills processes that do not respond, without waiting half a minute.
- It does not restart after errors that would occur again, or after a stop request.
"""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.config import ConfigError
from lockstep.io.temporary_directory import temporary_directory
from lockstep.launch import fork_server
from lockstep.launch.device import threads_per_process
from lockstep.launch.failures import summarize_failures
from lockstep.launch.hang_report import kill_group, report, write_report
from lockstep.launch.local_rendezvous import LocalRendezvous
from lockstep.launch.process_lifetime import ENV_LAUNCH_DIR, LAUNCHER, OUTCOME, PEER_FAILED, SERVER
from lockstep.launch.progress import WorkerProgress, overdue_workers
from lockstep.launch.rendezvous import HostConfig, LaunchConfig, multi_host, single_host
from lockstep.launch.worker_processes import KILL_TIMEOUT, start_workers
from lockstep.launch.world import EXIT_PREEMPTED, SIGNAL_DEBOUNCE_SECONDS, STOP_SIGNALS, warn_user

INTERRUPTED = 130
"""Exit code of a run that was ended immediately, as shells use it for an interrupt."""
_GRACE = 8.0
"""Seconds that processes have to exit when another one has failed."""


@dataclass(frozen=True)
class LaunchResult:
    """Exit code of a launch, and its cause."""

    code: int
    cause: str = ""
    """Message for the user; empty if there is nothing to report."""


def launch(
    arguments: Sequence[str],
    config: LaunchConfig,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    poll: Callable[[], None] | None = None,
) -> LaunchResult:
    """Run `lockstep ARGUMENTS` on several processes until they end. Forward signals to them.

    `poll` is called about twice a second in this process. An exception that it raises stops the processes.
    """
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    with temporary_directory() as shared:
        (shared / LAUNCHER).write_text(str(os.getpid()))
        host = single_host() if config.endpoint is None else multi_host(config.endpoint)
        for warning in host.warnings:
            warn_user(warning)
        settings = {
            # Restarted workers would read stale addresses from a store that is shared with the rendezvous.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # Record the latest collectives, for hang reports.
            "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "200"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_process(config.processes))),
            ENV_LAUNCH_DIR: str(shared),
            **host.environment,
            **(environment or {}),
        }
        with _environment(settings):
            return _Launch(arguments, config, host, shared, quiet, poll).run()


def launch_captured(arguments: Sequence[str], processes: int, environment: Mapping[str, str] | None = None) -> str:
    """Launch processes for a command that reads their results from a file. Return why they failed, or nothing.

    Such processes have nothing to save: an interrupt ends them and the command immediately.
    """
    outcome = launch(arguments, LaunchConfig(processes), environment, quiet=True)
    if outcome.code == INTERRUPTED:
        raise KeyboardInterrupt
    return outcome.cause


class _Launch:
    """One launch. The agent runs in its own thread, so that the main thread can handle signals."""

    def __init__(
        self,
        arguments: Sequence[str],
        config: LaunchConfig,
        host: HostConfig,
        shared: Path,
        quiet: bool,
        poll: Callable[[], None] | None,
    ) -> None:
        self.shared, self.graceful, self.poll = shared, not quiet, poll
        # Block stop signals from the moment other hosts can connect until `run` handles them.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.agent = _make_agent(arguments, config, host, shared, quiet)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            raise
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._stop_requested: float | None = None
        self._kill_requested = self._not_started = False

    def run(self) -> LaunchResult:
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        # A daemon thread, because it may wait for other hosts when the launcher is stopped.
        thread = threading.Thread(target=self._work, name="agent", daemon=True)
        try:
            thread.start()
            while thread.is_alive() and not self._not_started:
                thread.join(0.5)
                if self.poll is not None:
                    self.poll()
        except BaseException:
            self.agent.kill()
            thread.join(_GRACE)
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._outcome()

    def _on_signal(self, number: int, _: object) -> None:
        """Forward the first stop signal to the processes. Kill them on a second one some seconds later."""
        now = time.monotonic()
        if self._stop_requested is None and self.graceful:
            self._stop_requested = now
            self._not_started = not self.agent.ask_to_stop()
        elif not self._kill_requested and (
            self._stop_requested is None or now - self._stop_requested > SIGNAL_DEBOUNCE_SECONDS
        ):
            self._kill_requested = True
            if self.graceful:
                warn_user(f"{signal.Signals(number).name} again: exiting immediately. Saved checkpoints are valid.")
            self.agent.kill()

    def _work(self) -> None:
        # Workers inherit these blocked signals, and unblock them once they can handle them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._result = self.agent.run()
        except BaseException as error:
            self._error = error
        finally:
            self.agent.close_rendezvous()

    def _outcome(self) -> LaunchResult:
        if self._not_started:
            return LaunchResult(EXIT_PREEMPTED, "stop requested while no process was training.")
        if self._kill_requested:
            return LaunchResult(INTERRUPTED, "ended immediately on request. Saved checkpoints are valid.")
        if self._error is not None:
            failure = f"the processes could not be started or could not connect: {self._error}"
            return LaunchResult(1, self.agent.cause or failure)
        if self._result is None or self._result.is_failed():
            resumable = self._stop_requested is not None and self.agent.restartable
            return LaunchResult(EXIT_PREEMPTED if resumable else 1, self.agent.cause or "the processes failed.")
        outcome = self.shared / OUTCOME
        kind, _, message = outcome.read_text().partition("\n") if outcome.exists() else ("", "", "")
        if kind == "superseded":
            return LaunchResult(1, message)
        return LaunchResult(EXIT_PREEMPTED if kind == "preempted" else 0)


class _Agent(LocalElasticAgent):
    """torch's elastic agent with stop requests, progress deadlines and failure reports."""

    def __init__(self, shared: Path, config: LaunchConfig, **settings: Any) -> None:
        super().__init__(**settings)
        self._shared, self._peer_failed_file, self._config = shared, shared / PEER_FAILED, config
        self.cause, self.restartable = "", False
        self._stopping = False
        self._killed: set[int] = set()
        """Pids that did not exit by themselves after another process had failed, and were killed."""
        self._warned = False
        self._hang = ""
        self._progress: dict[int, WorkerProgress] = {}
        """Progress of the workers of this attempt, by local rank."""

    def ask_to_stop(self) -> bool:
        """Request every process to save and exit at the end of its iteration. Return whether any process is alive."""
        self._stopping = True
        alive = [process for process in self._processes() if process.poll() is None]
        for process in alive:
            with suppress(ProcessLookupError):  # killed meanwhile, together with its fork server
                os.kill(process.pid, signal.SIGUSR1)
        return bool(alive)

    def kill(self) -> None:
        self._remaining_restarts = 0
        for process in self._processes():
            if process.poll() is None:
                kill_group(process.pid)

    def close_rendezvous(self) -> None:
        self._worker_group.spec.rdzv_handler.shutdown()

    def _processes(self) -> list[Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handler.proc for handler in handlers.values()]

    def _start_workers(self, worker_group: WorkerGroup) -> Any:
        self._peer_failed_file.unlink(missing_ok=True)
        self._progress, self._hang = {}, ""
        start_processes = local_elastic_agent.start_processes
        local_elastic_agent.start_processes = partial(start_workers, self._fork_server())
        try:
            started = super()._start_workers(worker_group)
        finally:
            local_elastic_agent.start_processes = start_processes
        if self._stopping:  # the request arrived before the processes were started
            self.ask_to_stop()
        return started

    def _fork_server(self) -> fork_server.ForkServer | None:
        """Return the server to fork workers from; None, with one warning, if forking is unsafe."""
        server = fork_server.obtain(os.environ)
        if isinstance(server, str):
            if server and not self._warned:
                self._warned = True
                warn_user(f"each process imports torch itself, which takes longer: {server}.")
            return None
        (self._shared / SERVER).write_text(str(server.pid))
        return server

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._terminate_workers()
        super()._stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._enforce_deadlines()
        if any(process.poll() for process in self._processes()):
            self._terminate_workers()  # before torch does so, which would wait half a minute for a stopped process
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._report_failure(result.failures, worker_group)
        return result

    def _enforce_deadlines(self) -> None:
        """Report and kill all workers if one of them exceeded its progress deadline."""
        workers = getattr(self._pcontext, "workers", {})
        alive = {rank: worker for rank, worker in workers.items() if worker.proc.poll() is None}
        overdue = overdue_workers(self._progress, {rank: worker.progress for rank, worker in alive.items()})
        if not overdue or self._hang:
            return
        pids = {rank: worker.proc.pid for rank, worker in alive.items()}
        self._hang = report(self._progress, pids, overdue, self._shared)
        run = next((worker.message.get("run") for worker in self._progress.values()), None)
        if run:
            write_report(Path(run), self._hang)
        for pid in pids.values():
            kill_group(pid)
        deadline = time.monotonic() + KILL_TIMEOUT
        while (remaining := [w for w in alive.values() if w.proc.poll() is None]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if remaining:
            self._remaining_restarts = 0
            numbers = ", ".join(str(worker.proc.pid) for worker in remaining)
            self._hang += f"\nSIGKILL does not end {numbers}: they wait for a disk or a device that does not respond."
        if len(remaining) == len(alive):  # torch's agent would wait for them forever
            self.cause, self.restartable = self._hang, True
            raise RuntimeError(self._hang)

    def _terminate_workers(self) -> None:
        """Send SIGTERM to all processes, and SIGKILL to those that do not exit in time."""
        self._peer_failed_file.touch()
        alive = [process for process in self._processes() if process.poll() is None]
        for process in alive:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in alive:
            if process.poll() is None:
                self._killed.add(process.pid)
                kill_group(process.pid)

    def _report_failure(self, failures: dict[int, Any], worker_group: WorkerGroup) -> None:
        """Report which process failed first and why, and whether all processes are restarted."""
        size = worker_group.workers[0].world_size
        self.cause, self.restartable = summarize_failures(failures, size, self._shared, self._killed)
        if self._hang:
            self.cause, self.restartable = self._hang, True
        if not self.restartable or self._stopping:
            self._remaining_restarts = 0  # the error would occur again, or the user requested a stop
        if self._remaining_restarts:
            restarts = f"{self._remaining_restarts} of {self._config.max_restarts} restarts left"
            warn_user(f"{self.cause}\nStarting again from the last checkpoint ({restarts}).")


def _make_agent(arguments: Sequence[str], config: LaunchConfig, host: HostConfig, shared: Path, quiet: bool) -> _Agent:
    job = config.job or uuid.uuid4().hex
    endpoint = config.endpoint
    handler = LocalRendezvous(job) if endpoint is None else _multi_host_rendezvous(endpoint, config, host, job)
    spec = WorkerSpec(
        role="lockstep",
        local_world_size=config.processes,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=0.1,
        local_addr=host.address,
    )
    logs = shared / "logs"
    logs.mkdir()
    output = DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL if quiet else Std.NONE)
    return _Agent(shared, config, spec=spec, logs_specs=output, exit_barrier_timeout=60)


def _multi_host_rendezvous(endpoint: str, config: LaunchConfig, host: HostConfig, job: str) -> RendezvousHandler:
    """Create the rendezvous of several hosts."""
    parameters = RendezvousParameters("c10d", endpoint, job, *config.nodes, local_addr=host.address, **host.rendezvous)
    try:
        return get_rendezvous_handler(parameters)
    except RendezvousConnectionError:
        raise ConfigError(
            f"cannot connect to the rendezvous at {endpoint}: another program uses that port, or none listens.",
            "Start the command on the first host, too, or use another port in --rdzv-endpoint on every host.",
        ) from None


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
