"""Background threads: handle signals, enforce progress deadlines, write heartbeats and detect hangs.

They run while the main thread is blocked in a kernel or in a collective, where Python signal handlers cannot run. One
thread handles signals and deadlines and never accesses the run's disk. The other thread writes and reads heartbeats on
that disk, and may block if the disk does.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.distributed import heartbeat
from lockstep.distributed.heartbeat import Heartbeat, HeartbeatFiles, HeartbeatStore, UtilizationReport
from lockstep.distributed.kv_store import KeyValueStore
from lockstep.distributed.process_status import ProcessStatus
from lockstep.distributed.resource_usage import ResourceMonitor
from lockstep.io.jsonl import HANG_REPORT
from lockstep.launch.failures import record_failure
from lockstep.launch.hang_report import CollectiveTimeoutError, in_time, send_report, write_report, written_since
from lockstep.launch.process_lifetime import EXIT_PEER_FAILED, PEER_FAILED, launch_directory
from lockstep.launch.progress import IdleTime, ProgressPipe, written_bytes
from lockstep.launch.stack_traces import format_stack, thread_stacks
from lockstep.launch.world import EXIT_PREEMPTED, SIGNAL_DEBOUNCE_SECONDS, STOP_SIGNALS, warn_user
from lockstep.ops.compilation import COMPILE

HANG_REPORT_SECONDS = 5.0
"""Seconds of waiting in a collective after which missing processes are reported."""
COMPILE_TIMEOUT = 1800.0
"""Seconds that a process may take to compile, to capture CUDA graphs, or from its start to its first phase."""
SAVE_FACTOR = 3.0
"""Multiple of the timeout that a save may take without writing. The disk may still flush earlier writes."""
SELF_REPORT_DELAY = 5.0
"""Seconds after its deadline that one process of several reports itself. Processes that wait for it report first."""
TICK = 1.0
"""Seconds between two checks; longer with many processes."""


class Watchdog:
    """Monitors one process from background threads of that process."""

    def __init__(self, status: ProcessStatus, timeout: float, max_hours: float | None) -> None:
        self.status, self.timeout = status, timeout
        self.saving: threading.Thread | None = None
        """Thread of a running checkpoint save. An exiting process waits for it for a few seconds."""
        self.longest_save = 0.0
        self._longest_iteration, self._iteration_end = 0.0, time.monotonic()
        """Longest time between iteration ends; 0 until an iteration with an update has ended."""
        self._deadline = time.monotonic() + max_hours * 3600 if max_hours is not None else None
        self._directory: Path | None = None
        self._board: HeartbeatFiles | HeartbeatStore | None = None
        self._requested_at: float | None = None
        self._stop_request_shared = False
        self._sequence = 0
        self._thread = threading.get_ident()
        self._read = self._write = -1
        self._tick = max(TICK, status.size / 256)
        self._reported = -1
        self._previous: dict[int, Heartbeat] = {}
        self._last_heartbeats: dict[int, Heartbeat] = {}
        self._last_straggler: int | None = None
        self._resources = ResourceMonitor(status.rank, status.device)
        self._previous_at = 0.0
        self._idle, self._pipe = IdleTime(), ProgressPipe()
        self._exit_after: float | None = None
        """Seconds after a stop request at which this process exits without a checkpoint."""
        self._finished = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the watchdog threads while the block runs."""
        before, wakeup, blocked = {}, -1, set()
        self._read, self._write = os.pipe()
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(self._write, False)
            wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            # Handlers do nothing: the watchdog reads signal numbers from the pipe, even while this thread is blocked.
            before = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
            for number in STOP_SIGNALS:
                signal.siginterrupt(number, False)
            # Workers start with these signals blocked, so that none is lost or kills the process before this point.
            blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        heartbeats = threading.Thread(target=self._run_heartbeats, name="heartbeats", daemon=True)
        thread.start()
        heartbeats.start()
        try:
            yield
        finally:
            if before:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # a late signal must not kill the process
                for number, handler in before.items():
                    # Signals that were blocked stay ignored: a thread started meanwhile may still receive one.
                    if number not in blocked:
                        signal.signal(number, handler)
                signal.set_wakeup_fd(wakeup)
            self._finished.set()
            os.write(self._write, b"\0")
            thread.join()
            heartbeats.join(1.0)  # it may be blocked on the disk
            os.close(self._write)
            os.close(self._read)

    def set_status_dir(self, directory: Path, store: KeyValueStore | None = None) -> None:
        """Start sending heartbeats, to a directory that all processes of the run share, or to the store."""
        self._board = HeartbeatFiles(directory) if store is None else HeartbeatStore(store, self.status.size)
        self._directory = directory
        if self.status.size > 1:
            self._board.write(self._sample())  # immediately, so that an early hang is reported, too

    def end_deadlines(self) -> None:
        """Stop enforcing deadlines. The remaining work has its own time limits."""
        self._directory = None

    def utilization_report(self) -> UtilizationReport:
        """Return the utilization of all processes since the last call."""
        if self._directory is None or self._board is None or self.status.size == 1:
            return UtilizationReport(resources=self._resources.read())
        before, now = self._last_heartbeats, self._board.read()
        slow = heartbeat.find_straggler(before, now)
        repeated = slow is not None and slow[0].process == self._last_straggler
        self._last_heartbeats, self._last_straggler = now, slow[0].process if slow else None
        message = f"{slow[0].process_name} works {slow[1]:.1f} times as long as the others" if repeated and slow else ""
        resources = {name: value for p in now.values() for name, value in p.resources.items()}
        return UtilizationReport(heartbeat.utilization(before, now), resources, message)

    @property
    def outer_phase(self) -> str:
        """The outermost phase; empty between phases."""
        return next(iter(self.status.phases[:]), "")

    def note_progress(self) -> None:
        """Record progress within a long phase, such as a step of an evaluation."""
        self.status.progress += 1

    def mark_iteration_end(self) -> None:
        """Record the duration of an iteration. A run can stop only at the end of an iteration."""
        now = time.monotonic()
        # Iterations before the first update, and parts of the startup, say nothing about how long learning takes.
        if self.status.update > 0:
            self._longest_iteration = max(0.8 * self._longest_iteration, now - self._iteration_end)
        self._iteration_end = now
        self._check_time_limit()  # iterations may be shorter than a tick

    def _check_time_limit(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline and self._requested_at is None:
            self._request_stop("run.max_hours is over")

    def _request_stop(self, reason: str | None) -> None:
        """Request that the training loop saves a checkpoint and stops at the end of this iteration."""
        self._requested_at = time.monotonic()
        self.status.stop_requested = True
        if reason is not None:
            warn_user(
                f"{reason}: saving at the end of this iteration{self._set_exit_deadline()}.\n"
                f"To exit at once without saving, press Ctrl-C or send the signal again after "
                f"{SIGNAL_DEBOUNCE_SECONDS:.0f} s."
            )

    def _set_exit_deadline(self) -> str:
        """Set the time limit of a stop request, once an iteration and a save have been timed. Return it as a phrase."""
        elapsed = time.monotonic() - self._iteration_end
        if not self._longest_iteration or not self.longest_save or self.status.phase == COMPILE:
            return f" (running for {elapsed:.0f} s; its duration is not known yet)"
        needed = max(self._longest_iteration, elapsed) + self.longest_save
        self._exit_after = 10.0 + 3.0 * needed
        return f", expected within {needed:.1f} s, or exiting without a checkpoint after {self._exit_after:.0f} s"

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        while True:
            for number in os.read(self._read, 64) if poller.poll(self._tick * 1000) else b"":
                if number == 0:
                    return
                self._on_signal(number)
            self._poll()

    def _on_signal(self, number: int) -> None:
        name, shared = signal.Signals(number).name, launch_directory()
        if number == signal.SIGTERM and shared is not None and (shared / PEER_FAILED).exists():
            self._exit(EXIT_PEER_FAILED)  # the launcher stops all processes because another one has failed
        elif self._requested_at is None:
            # The launcher forwards a stop request to every process. Only the main process reports it.
            forwarded = number == signal.SIGUSR1 and shared is not None and self.status.rank > 0
            process = f"process {self.status.rank} on {socket.gethostname()}"
            self._request_stop(None if forwarded else f"{process} received {name}")
        elif time.monotonic() - self._requested_at > SIGNAL_DEBOUNCE_SECONDS:
            self._exit(128 + number)

    def join_pending_save(self) -> None:
        """Wait up to 3 s for a running save before the process exits after a failure."""
        if self.saving is not None:
            self.saving.join(3.0)

    def _exit(self, code: int) -> None:
        """Exit now, whatever the main thread does, after waiting briefly for a running save."""
        self.join_pending_save()
        os._exit(code)

    def _poll(self) -> None:
        self._check_time_limit()
        limit = self._exit_after
        if limit is not None and self._requested_at is not None and time.monotonic() - self._requested_at > limit:
            warn_user(
                f"no checkpoint within {limit:.0f} s of the stop request: exiting. Earlier checkpoints are valid."
            )
            self._exit(EXIT_PREEMPTED if launch_directory() is None else EXIT_PEER_FAILED)
        idle, allowed = self.send_progress()
        # A process that waits in a collective is not the cause. The waiting processes report the missing one first.
        late = SELF_REPORT_DELAY if self.status.size > 1 else 0.0
        if allowed is not None and self.status.collective_log.now() is None and idle > allowed + late:
            self._report_stall(allowed, idle)

    def send_progress(self) -> tuple[float, float | None]:
        """Send progress to the launcher. Return the seconds without progress, and the seconds allowed."""
        status, save = self.status, self.saving
        saving = save is not None and save.is_alive()
        written = written_bytes(save.native_id) if save is not None and saving else 0
        done = status.progress, status.collective_log.completed, written
        idle, allowed = self._idle.update(done), self._allowed(saving)
        waiting = status.collective_log.now()
        self._pipe.send(
            progress=done,
            allowed=allowed,
            rank=status.rank,
            phase=status.phase,
            update=status.update,
            waits_in="" if waiting is None else waiting.name,
            compiling=waiting is None and status.phase == COMPILE,
            run="" if self._directory is None else str(self._directory.parent.parent),
        )
        return idle, allowed

    def _allowed(self, saving: bool) -> float | None:
        """Return the allowed seconds without progress; None before the run directory is open and after the run."""
        if self._directory is None:
            return None
        starting = not {"collect", "evaluate"} & self.status.phase_counts.keys()
        if starting or self.status.phase == COMPILE:
            return max(COMPILE_TIMEOUT, self.timeout)
        return SAVE_FACTOR * self.timeout if saving else self.timeout

    def _report_stall(self, allowed: float, idle: float) -> None:
        """Report the stacks of all threads and exit."""
        found, me = thread_stacks(), threading.get_ident()
        stacks = [
            f"thread {thread.name}:\n" + "\n".join(f"      {line}" for line in format_stack(found[thread.ident]))
            for thread in threading.enumerate()
            if thread.ident in found and thread.ident != me
        ]
        process = f"process {self.status.rank} on {socket.gethostname()} (pid {os.getpid()})"
        message = (
            f"{process} made no progress for {idle:.0f} s in phase {self.status.phase} "
            f"(update {self.status.update}), at:\n  "
            + "\n  ".join(stacks)
            + f"\nThe limit is {allowed:.0f} s (run.collective_timeout is {self.timeout:.0f}). Aborting the run. "
            "Raise --run.collective-timeout if this work takes longer."
        )
        record_failure(CollectiveTimeoutError(message))
        if launch_directory() is None:
            in_time(lambda: warn_user(message))
        if (directory := self._directory) is not None:
            write_report(directory.parent.parent, message)
        self._exit(1)

    def _run_heartbeats(self) -> None:
        """Send heartbeats, and check those of the others for missing processes."""
        while not self._finished.wait(self._tick):
            directory, board = self._directory, self._board
            if directory is None or board is None or self.status.size == 1:
                continue
            me = self._sample()
            board.write(me)
            self._share_stop_request(board)
            if me.wait_seconds is not None and me.wait_seconds > HANG_REPORT_SECONDS / 2:
                self._report_hang(directory, board, me)

    def _share_stop_request(self, board: HeartbeatFiles | HeartbeatStore) -> None:
        """Share a stop request with all processes before their next collective, which may be minutes away."""
        if self._requested_at is not None and not self._stop_request_shared:
            self._stop_request_shared = True
            board.request_stop()
        elif self._requested_at is None and board.stop_requested():
            self._stop_request_shared = True
            self._request_stop(None)

    def _sample(self) -> Heartbeat:
        self._sequence += 1
        status, log = self.status, self.status.collective_log
        waiting = log.now()
        stacks, save, now = thread_stacks(), self.saving, time.monotonic()
        stack = format_stack(stacks.get(self._thread, ()))
        if save is not None and save.is_alive() and status.phase == "copy":  # the main thread waits for this save
            stack += format_stack(stacks.get(save.ident or 0, ()))
        waits = None if waiting is None or waiting.since is None else now - waiting.since
        return Heartbeat(
            process=status.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            sequence=self._sequence,
            phase=self.status.phase,
            update=status.update,
            collective=log.begun if waiting is None else waiting.number,
            name=log.last if waiting is None else waiting.name,
            wait_seconds=waits,
            busy=now - status.started - log.waited - (waits or 0.0),
            age=now - status.started,
            resources=self._resources.read(),
            stack=stack,
            launched_at="" if waiting is None else waiting.line,
            device_behind=waiting is not None and waiting.since is None,
        )

    def _report_hang(self, directory: Path, board: HeartbeatFiles | HeartbeatStore, me: Heartbeat) -> None:
        """Report the missing processes once; at the timeout, report again and abort the run."""
        now = board.read()
        if not self._previous:
            self._previous, self._previous_at = now, time.monotonic()
        waits = me.wait_seconds or 0.0
        # While any process compiles, the others wait longer than usual without a hang.
        compiling = any(p.phase == COMPILE and p.wait_seconds is None for p in now.values())
        over = waits > (COMPILE_TIMEOUT if compiling else self.timeout)
        if waits < HANG_REPORT_SECONDS or (time.monotonic() - self._previous_at < 2.0 * self._tick and not over):
            return  # too early to tell which heartbeats are stale
        if me.collective != self._reported or over:
            report = heartbeat.describe_hang(self._previous, now, self.status.size, me)
            stale = heartbeat.stale_processes(self._previous, now)
            waiting = (p.process for p in now.values() if p.wait_seconds is not None and p.process not in stale)
            first = min(waiting, default=me.process)
            if first == me.process and me.collective != self._reported:
                warn_user(report)
            self._reported = me.collective
            if over:
                self._abort(directory, report, first == me.process)
        self._previous, self._previous_at = now, time.monotonic()

    def _abort(self, directory: Path, report: str, is_writer: bool) -> None:
        message = (
            f"{report}\nCollective timed out after {self.timeout:.0f} s (run.collective_timeout). Aborting the run."
        )
        path = directory.parent.parent / HANG_REPORT
        # One process writes the report. The others exit after it, because the launcher ends all after the first exit.
        now = time.time()
        while not is_writer and not written_since(path, now - self.timeout):
            time.sleep(0.1)
            is_writer = time.time() > now + 3.0
        if is_writer:
            try:
                path.write_text(f"{message}\n\n{_flight_records()}\n")
                message += f"\nThis report is in {path}."
            except OSError as error:
                message += f"\n(The report could not be written: {error}.)"
            warn_user(message)
            send_report(path.parent)
        record_failure(CollectiveTimeoutError(message))
        self._exit(1)


def _flight_records() -> str:
    """Return the records of torch's flight recorder: the latest collectives over gloo and, if available, NCCL."""
    import torch._C._distributed_c10d as c10d

    records = []
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("NCCL", "_dump_nccl_trace_json")):
        if not hasattr(c10d, name):
            continue
        try:
            record = getattr(c10d, name)()
            text = record.decode() if isinstance(record, bytes) else str(record)
            records.append(f"torch's flight recorder of {backend}:\n{text[:100_000]}")
        except Exception as error:
            records.append(f"torch's flight recorder of {backend} cannot be read: {error}.")
    return "\n\n".join(records)
