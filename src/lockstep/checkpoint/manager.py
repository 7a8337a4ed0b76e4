"""Checkpoints of the whole run: written in the background, published by a rename, restored on any world size."""

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.base import Algorithm, VecEnv
from lockstep.checkpoint import format as form
from lockstep.checkpoint.chain import ChainWriter, in_manifest
from lockstep.checkpoint.disk import DISK, Disk
from lockstep.checkpoint.fencing import GenerationFence, SupersededError
from lockstep.checkpoint.format import CorruptCheckpointError
from lockstep.checkpoint.handshake import SaveHandshake
from lockstep.checkpoint.incremental import IncrementalState
from lockstep.checkpoint.machine import compare_machines, describe_machine
from lockstep.checkpoint.naming import CheckpointName
from lockstep.checkpoint.publishing import clear_leftovers, prune, publish
from lockstep.checkpoint.save_interval import SaveInterval
from lockstep.checkpoint.snapshot import snapshot_shared, split_lane_state, without_rows
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed import Runtime
from lockstep.io.durable import fsync_dir
from lockstep.io.jsonl import sync_lines
from lockstep.lanes import partition_lanes
from lockstep.process_hours import KEPT_SAVES
from lockstep.protocols import AppendOnlyTensor, StateDict

SLOW_SECONDS = 1.0
"""Warn if training waits longer than this for the previous save."""
StateValues = dict[str, Any]
"""Plain values of a checkpoint, as in train_state.json."""
_LOGGER = logging.getLogger("lockstep")


class CheckpointManager:
    """Saves and restores the checkpoints of one run directory. Every process of the run has one."""

    def __init__(
        self,
        directory: Path,
        run: RunConfig,
        runtime: Runtime,
        settings: Mapping[str, Any] | None = None,
        disk: Disk = DISK,
        sync_logs: Callable[[], None] | None = None,
        location: str = "",
    ) -> None:
        self.directory, self.run, self.runtime, self.disk = directory, run, runtime, disk
        self._location = location or str(directory.parent)
        """Path or URL of the run, for messages."""
        self._sync_logs = sync_logs or partial(sync_lines, directory.parent)
        self.notes: list[str] = []
        """Messages for the user about the restore."""
        self._last: CheckpointName | None = None
        self._last_complete: CheckpointName | None = None
        """The newest checkpoint that is known to be published."""
        self.published: list[tuple[int, float]] = []
        """Samples of the newest checkpoints of this start, and the seconds since its start when each was copied."""
        self._thread: threading.Thread | None = None
        self._problem = ""
        """Why the last save failed, equal on all processes; empty if it was published."""
        self._error: BaseException | None = None
        self._unmarked_best: CheckpointName | None = None
        """The best checkpoint, if the pointer to it could not be written yet."""
        self._untidy: CheckpointName | None = None
        """The newest checkpoint, if older ones could not be deleted after it."""
        self._save_interval = SaveInterval()
        self._segments = IncrementalState(run.replay_parity and not disk.is_remote)
        self._machine = describe_machine(runtime.device)
        self.fence = GenerationFence(directory, runtime.is_main, disk)
        self.chain = ChainWriter(directory.parent, settings or {})
        self._handshake = SaveHandshake(
            runtime.kv_store, runtime.rank, runtime.size, run.collective_timeout, runtime.watchdog.note_progress
        )

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(
        self, algorithm: Algorithm, task: VecEnv, clock: TrainState, at: int | None = None, without_replay: bool = False
    ) -> None:
        """Restore agent, task and clock from the newest undamaged checkpoint, or the one at `at` samples, if any.

        `without_replay` also accepts a checkpoint with damaged replay, and starts with an empty replay buffer.
        """
        machines = self.runtime.all_gather_json(self._machine)
        # If an earlier start of this job has published a checkpoint, that one has valid replay: load it.
        job = self.runtime.job_id
        without_replay = self.runtime.run_on_main(lambda: without_replay and not self.fence.has_published(job))
        check = partial(self.disk.verify, replay=not without_replay)
        chosen, self.notes = self._fence_on_main(partial(self.fence.begin, at, job, self.runtime.size, check))
        while True:
            problem = ""
            if chosen:
                path = self.directory / str(chosen)
                try:
                    with form.user_facing_errors(path):
                        self.disk.fetch(path, self.runtime.lanes.local, replay=not without_replay)
                        self.notes += compare_machines(form.read_manifest(path)["machine"], machines, self.run)
                        self._restore(path, algorithm, task, clock, without_replay)
                except ConfigError as error:
                    problem = str(error)
            problems = [problem for problem in self.runtime.all_gather_json(problem) if problem]
            next_chosen, notes = self._fence_on_main(partial(self.fence.confirm, chosen, problems))
            if next_chosen == chosen:
                break
            chosen = next_chosen
            self.notes += notes
        if chosen:
            self.disk.release(self.directory / str(chosen))
        self._last_complete = chosen

    def _restore(self, path: Path, algorithm: Algorithm, task: VecEnv, clock: TrainState, without_replay: bool) -> None:
        files = form.read_manifest(path)["files"]
        values = form.read_values(path)
        if values["lanes"] != self.runtime.lanes.num_lanes:
            raise ConfigError(
                f"{path} was written with {values['lanes']} lanes and the config says {self.runtime.lanes.num_lanes}.",
                f"The number of lanes of a run cannot change: set run.lanes to {values['lanes']} in its config.yaml.",
            )
        shared = form.read_shared(path)
        algorithm.load_shared_state(form.strip_prefix(shared, "algorithm"))
        task.load_shared_state(form.strip_prefix(shared, "task"))
        rows = values.get("rows")
        if rows and not without_replay:
            self._segments.resume(files, rows)
        for lane in self.runtime.lanes.local:
            live = algorithm.lane_state(lane)
            replay = {f"algorithm.{name}": value for name, value in live.items() if isinstance(value, AppendOnlyTensor)}
            state = form.read_lane(path, lane, files, None if without_replay else rows, replay)
            owned = form.strip_prefix(state, "algorithm")
            algorithm.load_lane_state(lane, without_rows(owned, live) if without_replay else owned)
            task.load_lane_state(lane, form.strip_prefix(state, "task"))
        budget, patience = clock.total_samples, clock.patience
        for name, value in values["clock"].items():
            setattr(clock, name, value)
        clock.total_samples, clock.patience = budget, patience  # a resumed run may have larger values of both
        if without_replay and rows:
            self.chain.started_with = "an empty replay buffer"
            self.notes.append(
                f"WITHOUT REPLAY: {rows[1] - rows[0]:,} rows of replay of checkpoint {path.name} were dropped because "
                "of --without-replay. The replay buffer is empty: the agent collects transitions before it learns "
                "again, and the run differs from the uninterrupted one."
            )
        self.notes.append(_partition_message(self.runtime.lanes.num_lanes, self.runtime.size, values["processes"]))

    def _fence_on_main(
        self, step: Callable[[], tuple[CheckpointName | None, list[str]]]
    ) -> tuple[CheckpointName | None, list[str]]:
        """Claim or confirm on the main process; return the checkpoint to load and messages on all processes."""

        def work() -> tuple[str | None, int, list[str]]:
            try:
                chosen, notes = step()
                if self.fence.settled:
                    clear_leftovers(self.fence)
            except OSError as error:
                raise ConfigError(
                    f"{self._location} cannot be used: {error}.", "Check the disk and the permissions of the directory."
                ) from None
            return (str(chosen) if chosen else None), self.fence.generation, notes

        text, self.fence.generation, notes = self.runtime.run_on_main(work)
        return CheckpointName.parse(text or ""), notes

    @property
    def newest_published(self) -> CheckpointName | None:
        """The newest checkpoint that is known to be published: after a restore, the loaded one."""
        return self._last_complete

    # -- saving --------------------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Return whether an automatic save is due. Only the main process decides; the training loop all-reduces it."""
        return self.run.save_every is None and self.runtime.is_main and self._save_interval.due

    def save(self, algorithm: Algorithm, task: VecEnv, clock: TrainState, *, best: bool = False) -> None:
        """Copy the state to host memory now; write and publish it in the background."""
        start = time.perf_counter()
        with self.runtime.phase("copy"):
            waited = self.wait()
            if waited > SLOW_SECONDS and self.runtime.is_main:
                _LOGGER.warning(
                    "Training waited %.0f s for the previous save: the storage is slow. Save less often with "
                    "--run.save-every.",
                    waited,
                )
            name = CheckpointName(clock.samples, self.fence.generation)
            if name == self._last:
                # Decide from memory, not from disk: processes may see the directory at different stages of writing.
                if best and self.runtime.is_main:
                    self._unmarked_best = name
                    self._update_pointers_and_prune(name)
                return
            self._last = name
            lanes, append_only = split_lane_state(algorithm, task, self.runtime.lanes.local)
            self._segments.stage(append_only, self.runtime.lanes.local)
            shared = snapshot_shared(algorithm, task) if self.runtime.is_main else {}
            values: StateValues = {
                "clock": asdict(clock),
                "lanes": self.runtime.lanes.num_lanes,
                "processes": self.runtime.size,
            }
            values |= {"format": form.FORMAT} | ({"rows": self._segments.rows} if append_only else {})
            keep = clock.crossed(self.run.keep_every)
        self._save_interval.begin()
        copying, copied_at = time.perf_counter() - start, time.monotonic() - self.runtime.status.started
        write = partial(self._write_files, name, lanes, shared, values, keep, best, copied_at)
        self._thread = threading.Thread(target=self._write, args=(write, copying), daemon=True)
        self.runtime.watchdog.saving = self._thread
        self._thread.start()

    def wait(self) -> float:
        """Wait until the current save is published or has failed on all processes; return the seconds waited.

        A save that fails because of the disk only logs a warning; the next save tries again.
        """
        start = time.monotonic()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._error is None:
                self._finish_save()
        if self._error is not None:
            raise RuntimeError(f"the checkpoint could not be written: {self._error}") from self._error
        return time.monotonic() - start

    def finish(self) -> None:
        """Wait for the last save of a run. Raises ConfigError if it failed."""
        self.wait()
        if self._untidy is not None and self.fence.allows_writing():  # no later save will repeat it
            self._update_pointers_and_prune(self._untidy)
        self._handshake.close()
        if self.runtime.all_reduce_any(superseded=bool(self.fence.superseded_by))["superseded"]:
            raise SupersededError(self.fence.superseded_by or self._problem)
        if self._problem:
            raise ConfigError(
                f"the last checkpoint could not be written: {self._problem}.",
                f"{_last_saved(self._last_complete)}. Fix that, then run: lockstep resume {self._location}",
            )

    def _finish_save(self) -> None:
        """Record whether the last save was published or failed."""
        # Wait until all processes know the result: a process that exits earlier may take the store with it.
        self.runtime.all_reduce_any(heard=True)
        if self.runtime.is_main:
            self._handshake.forget()
        if self.disk.is_remote:  # its files were uploaded
            shutil.rmtree(self.directory / f".{self._last}.partial", ignore_errors=True)
        if not self._problem:
            self._last_complete = self._last
            self._segments.commit()
            return
        if self._segments.unlinked:
            self._segments.reset()
        if self.runtime.is_main:
            _LOGGER.warning(
                "The checkpoint %s could not be written: %s. %s. Training continues, and the next save tries again.",
                self._last,
                self._problem,
                _last_saved(self._last_complete),
            )
        self._last = self._last_complete

    def _write(self, write: Callable[[], None], copying: float) -> None:
        """Write and publish in the background thread; record errors and how long the save took."""
        start = time.monotonic()
        try:
            write()
        except BaseException as error:
            self._error = error
        message = self._save_interval.update(copying + time.thread_time())  # CPU time of this thread, one per save
        if message and self.run.save_every is None and self.runtime.is_main:
            self.runtime.pending_messages.append(message)
        watchdog = self.runtime.watchdog
        watchdog.longest_save = max(0.8 * watchdog.longest_save, copying + time.monotonic() - start)

    def _write_files(
        self,
        name: CheckpointName,
        lanes: StateDict,
        shared: StateDict,
        values: StateValues,
        keep: bool,
        best: bool,
        copied_at: float,
    ) -> None:
        partial, lane_file = self.directory / f".{name}.partial", form.lane_file(self.runtime.lanes.local)
        with self._handshake.beating():
            problem, files = "", {}
            try:
                partial.mkdir(exist_ok=True)
                files[lane_file] = form.write_tensors(partial / lane_file, lanes)
                files |= self._segments.write(partial)
                self.disk.upload(partial, files)
            except OSError as error:
                problem = self._describe(error)
            self.runtime.fault_point("save")
            self._handshake.report(files, problem)
            if self.runtime.is_main:
                self._problem = self._commit(name, partial, shared, values, keep)
                self._handshake.announce([self._problem, self._segments.unlinked])
        if self.runtime.is_main:
            if not self._problem:
                self.published = [*self.published, (name.samples, copied_at)][-KEPT_SAVES:]
                self._unmarked_best = name if best else self._unmarked_best
                self._update_pointers_and_prune(name)
            return
        self._problem, self._segments.unlinked = self._handshake.verdict()

    def _commit(self, name: CheckpointName, partial: Path, shared: StateDict, values: StateValues, keep: bool) -> str:
        """On the main process: write the shared files, collect all results and publish; return problems, if any."""
        files, problems = {}, []
        try:
            files[form.SHARED] = form.write_tensors(partial / form.SHARED, shared)
            files[form.VALUES] = form.write_json(partial / form.VALUES, values)
            self.disk.upload(partial, files)
        except OSError as error:
            problems.append(self._describe(error))
        reported, reported_problems = self._handshake.collect()
        files, problems = files | reported, problems + reported_problems
        if not problems:
            try:
                entry = self.chain.new_entry(
                    name,
                    self._last_complete,
                    files,
                    self._machine,
                    self.runtime.size,
                    not values["clock"]["eval_pending"],
                )
                last, lanes = self.directory / str(self._last_complete), self.runtime.lanes.num_lanes
                self._segments.link(last, partial, files, lanes, self.disk.link)
                form.write_manifest(partial, files, keep, self._machine, in_manifest(entry))
                fsync_dir(partial)
                self.chain.append(entry)
                self._sync_logs()
                self.runtime.fault_point("publish")
                publish(self.fence, partial, name)
                self.chain.published(entry)
            except (OSError, CorruptCheckpointError) as error:
                problems.append(self._describe(error))
        if problems:
            shutil.rmtree(partial, ignore_errors=True)  # all processes have reported, so none still writes here
        return "; ".join(dict.fromkeys(problems))

    def _update_pointers_and_prune(self, name: CheckpointName) -> None:
        """Point to a new checkpoint and delete old ones. Errors are only logged: the checkpoint is published.

        What failed is repeated after the next save, or at the end of the run.
        """
        self._untidy = name
        try:
            self.disk.replace(self.directory / "latest", str(name))
            if self._unmarked_best is not None:
                self.disk.replace(self.directory / "best", str(self._unmarked_best))
                self._unmarked_best = None
            prune(self.fence, self.run.keep_last)
            self._untidy = None
        except (OSError, CorruptCheckpointError) as error:
            _LOGGER.warning(
                "Checkpoint %s is published, but updating pointers or deleting old checkpoints failed: %s.",
                name,
                self._describe(error),
            )

    def _describe(self, error: Exception) -> str:
        return f"process {self.runtime.rank} on {socket.gethostname()}: {error}"


def _last_saved(name: CheckpointName | None) -> str:
    return f"The checkpoint at {name.samples:,} samples is kept" if name else "There is no checkpoint yet"


def _partition_message(lanes: int, now: int, before: int) -> str:
    shares = [len(share) for share in partition_lanes(lanes, now)]
    split = f"{shares[0]} each" if len(set(shares)) == 1 else ", ".join(map(str, shares))
    hosts = f"1 process hosts all {lanes} lanes" if now == 1 else f"{now} processes host the {lanes} lanes ({split})"
    return f"{hosts} of this run; the checkpoint was written by {before}."
