"""Run directory, shared by all processes of a run."""

import json
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lockstep import __version__
from lockstep.base import Algorithm, VecEnv
from lockstep.base.dataset import has_playback
from lockstep.bucket.urls import is_url
from lockstep.bucket_run import BucketRun
from lockstep.checkpoint.chain import recorded_settings
from lockstep.checkpoint.disk import DISK
from lockstep.checkpoint.fencing import SupersededError
from lockstep.checkpoint.format import replace_text
from lockstep.checkpoint.format_version import FORMAT, config_without_version
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.clock import TrainState
from lockstep.config import (
    ConfigError,
    Recipe,
    as_dict,
    check_text,
    read_yaml,
    setting_differences,
)
from lockstep.distributed import Runtime
from lockstep.io.jsonl import (
    CHANGES,
    CHECKPOINTS,
    CONFIG,
    HEARTBEATS,
    SEVERAL_RUNS,
    STATUS,
    TASK,
    append_jsonl,
    read_status,
)
from lockstep.io.safe_read import UnreadableFileError, read_json
from lockstep.lanes import Lanes, partition_lanes
from lockstep.loggers.process_log import ProcessLog
from lockstep.loggers.run_logger import open_log
from lockstep.loggers.wandb_logger import require_wandb
from lockstep.process_hours import ProcessHours, read_process_hours
from lockstep.run_dir_checks import refuse_links, refuse_unshared
from lockstep.run_reservation import create_run, remove_if_unstarted, run_of_job, run_path
from lockstep.task_spec import describe_task

STATUS_SECONDS = 10.0
"""Seconds between two writes of the process-hours to the status file at least."""


@dataclass(frozen=True)
class TrainResult:
    """Result of `train`."""

    path: Path
    clock: TrainState
    seconds: float = 0.0
    """Duration in seconds since this start of the run."""
    preempted: bool = False
    """Whether a stop request ended the run early. It can be resumed from its last checkpoint."""
    evaluation_seconds: float = 0.0
    """Seconds of evaluations since this start of the run."""
    playable: bool = True
    """Whether `lockstep play` can show the run."""
    location: str = ""
    """Path or URL of the run, for commands."""


class RunDir:
    """Files of a run: config, log, status and checkpoints."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        runtime: Runtime,
        log: ProcessLog,
        heartbeats: Path,
        older_heartbeats: list[Path],
        bucket: BucketRun | None = None,
    ) -> None:
        self.path, self.log, self.runtime, self.bucket = path, log, runtime, bucket
        self._recipe, self._heartbeats, self._older_heartbeats = recipe, heartbeats, older_heartbeats
        self.location = bucket.url if bucket else str(path)
        """Path or URL of the run, for commands."""
        settings = recorded_settings(recipe, runtime.lanes.num_lanes)
        self.checkpoints = CheckpointManager(
            path / CHECKPOINTS,
            recipe.run,
            runtime,
            settings,
            bucket.disk if bucket else DISK,
            bucket.sync_logs if bucket else None,
            self.location,
        )
        self._hours: ProcessHours | None = None
        self._status_at = 0.0

    @classmethod
    @contextmanager
    def open(cls, recipe: Recipe, runtime: Runtime, resume: bool) -> Iterator["RunDir"]:
        """Create a run directory, or open the one to resume. All processes get the same directory."""
        with ExitStack() as on_exit:
            bucket, older = None, []
            if is_url(recipe.run.runs_dir):
                status = _status("running", runtime)
                bucket = on_exit.enter_context(BucketRun.open(recipe, runtime, resume, status))
                path, heartbeats = bucket.path, bucket.heartbeats
                lanes = runtime.run_on_main(partial(_prepare_in_bucket, bucket, recipe))
            else:
                name, lanes, start, starts = runtime.run_on_main(lambda: _prepare(recipe, runtime, resume))
                path = Path(name)
                heartbeats, older = path / HEARTBEATS / start, [path / HEARTBEATS / other for other in starts]
                refuse_unshared(heartbeats, runtime)
            runtime.lanes = Lanes(lanes, partition_lanes(lanes, runtime.size)[runtime.rank], recipe.run.seed)
            common = bucket is None or bucket.has_common_directory()
            runtime.watchdog.set_status_dir(heartbeats, None if common else runtime.kv_store())
            log = open_log(path, recipe, runtime, bucket.url if bucket else "")
            run = cls(path, recipe, runtime, log, heartbeats, older, bucket)
            failed_new_run = False
            try:
                yield run
            except BaseException as error:
                failed_new_run = not resume
                log.failed(error)
                runtime.watchdog.join_pending_save()
                # Do not change the status after a failed resume: another job may be training the run.
                if run.checkpoints.fence.settled or not resume:
                    state = "superseded" if isinstance(error, SupersededError) else "failed"
                    run.write_status(state, f"{type(error).__name__}: {error}")
                raise
            finally:
                log.close()
                if bucket is not None:
                    bucket.close(failed_new_run)
                elif failed_new_run and runtime.is_main:
                    remove_if_unstarted(path, runtime.job_id)

    def restore(
        self, algorithm: Algorithm, task: VecEnv, clock: TrainState, at: int | None = None, without_replay: bool = False
    ) -> None:
        """Load the newest checkpoint, or the one at `at` samples, if any. Then claim the run for this start."""
        self.checkpoints.restore(algorithm, task, clock, at, without_replay)
        notes = self.checkpoints.notes
        if self.runtime.is_main:
            with _user_facing_errors(self.path):
                notes = notes + _record_changes(self.path, self._recipe, clock)
                before, fence = read_process_hours(read_status(self.path)) or ProcessHours(), self.checkpoints.fence
                self._hours = before.next_start(self.checkpoints.newest_published, self.runtime.size, fence.generation)
                _write_status_and_config(self.path, self._recipe, self.runtime, self._measure_hours())
                if description := describe_task(task):
                    replace_text(self.path / TASK, description)
                # Only of starts before this one: a newer one may be loading, and has claimed nothing yet.
                for older in self._older_heartbeats:
                    shutil.rmtree(older, ignore_errors=True)
                # A newer start that claimed the run first has removed it.
                self._heartbeats.mkdir(parents=True, exist_ok=True)
        self.log.begin(clock, notes)
        if self.bucket is not None:
            self.bucket.begin(self.checkpoints.fence)

    def write_status(self, state: str, why: str = "") -> None:
        """Write the status file for users and schedulers. A superseded start does not overwrite it."""
        if self.runtime.is_main and (state == "superseded" or self.checkpoints.fence.allows_writing()):
            name = STATUS if state != "superseded" else f"superseded-{self.checkpoints.fence.generation:04d}.json"
            with suppress(OSError):  # disk errors are reported when a checkpoint is saved
                replace_text(self.path / name, _status(state, self.runtime, why, self._measure_hours()))
                self._status_at = time.monotonic()

    def write_log(self, clock: TrainState) -> None:
        """Log the metrics since the last entry, unless a newer start has taken over the run."""
        metrics = clock.flush_metrics()
        if self.checkpoints.fence.allows_writing():
            self.log.write(clock, metrics)
            if time.monotonic() - self._status_at > STATUS_SECONDS:
                self.write_status("running")

    def _measure_hours(self) -> ProcessHours | None:
        """Return the process-hours up to now. Before this start has loaded its checkpoint: those of earlier starts."""
        if self._hours is None:
            return read_process_hours(read_status(self.path))
        self._hours.seconds = time.monotonic() - self.runtime.status.started
        self._hours.saves = self.checkpoints.published
        return self._hours

    def finish(self, algorithm: Algorithm, task: VecEnv, clock: TrainState, preempted: bool) -> TrainResult:
        """Save the last checkpoint and, once it is complete on all processes, write how the run ended."""
        self.checkpoints.save(algorithm, task, clock)
        self.checkpoints.finish()
        self.runtime.watchdog.end_deadlines()
        self.write_status("preempted" if preempted else "finished")
        if self.runtime.is_main:
            shutil.rmtree(self._heartbeats, ignore_errors=True)
            with suppress(OSError):  # another start may be loading: it has a directory there
                self._heartbeats.parent.rmdir()
        self.log.take_times()
        seconds = time.monotonic() - self.runtime.status.started
        result = TrainResult(
            self.path,
            clock,
            seconds,
            preempted,
            self.log.evaluation_seconds,
            has_playback(self._recipe.task),
            self.location,
        )
        if not preempted:
            self.log.finish()
        return result

    def record_evaluation(
        self, clock: TrainState, evaluation: dict[str, float], algorithm: Algorithm, task: VecEnv
    ) -> None:
        """Record an evaluation. If it is the best so far, save a checkpoint."""
        best = clock.record_evaluation(evaluation)
        self.log.evaluation(clock)
        if best:
            self.checkpoints.save(algorithm, task, clock, best=True)


def _prepare(recipe: Recipe, runtime: Runtime, resume: bool) -> tuple[str, int, str, list[str]]:
    """Prepare the run directory on rank 0.

    Return its path, the number of lanes, and the names of the heartbeat directories of this start and of earlier ones.

    A directory that contains a run is rejected, unless the same job started it: then a host joined or left, or a
    scheduler restarted the job, and the run resumes. A run to be resumed is not modified yet.
    """
    require_wandb(recipe.run)
    existing = run_of_job(recipe, runtime.job_id)
    path, lanes = existing or run_path(recipe), runtime.lanes.num_lanes
    heartbeat_id = uuid.uuid4().hex[:8]
    with _user_facing_errors(path):
        if existing is not None:
            lanes = _saved_lanes(path) or lanes  # the number of lanes never changes
        elif resume:
            refuse_links(path)
        else:
            path = create_run(recipe, _status("running", runtime))
            _write_status_and_config(path, recipe, runtime)
        earlier = [folder.name for folder in (path / HEARTBEATS).glob("*")]
        (path / HEARTBEATS / heartbeat_id).mkdir(parents=True)
    return str(path), lanes, heartbeat_id, earlier


def _prepare_in_bucket(bucket: BucketRun, recipe: Recipe) -> int:
    """Write the config of a new run on rank 0. Return the number of lanes, which never changes."""
    require_wandb(recipe.run)
    lanes = _saved_lanes(bucket.path)
    if lanes is None:
        _write_status_and_config(bucket.path, recipe, bucket.runtime)
        bucket.upload_config()
    return lanes or bucket.runtime.lanes.num_lanes


def _saved_lanes(path: Path) -> int | None:
    """Return the number of lanes of a run. None: it has not written its config."""
    return read_config(path)[1]["run"].get("lanes") if (path / CONFIG).exists() else None


def _record_changes(path: Path, recipe: Recipe, clock: TrainState) -> list[str]:
    """Append the settings that differ from the config of a resumed run to its history. Return a message for each."""
    if clock.iteration == 0 or not (path / CONFIG).is_file():
        return []
    # The number of lanes and the location are those of the directory. Settings of a newer version have no old value.
    ignored = ("run.lanes", "run.name", "run.runs_dir")
    differences = setting_differences(read_config(path)[1], recipe)
    changes = {key: values for key, values in differences.items() if key not in ignored}
    if changes:
        append_jsonl(path / CHANGES, {"samples": clock.samples, "changes": changes})
    return [f"Changed from {clock.samples:,} samples: {key} {old} -> {new}." for key, (old, new) in changes.items()]


def _write_status_and_config(path: Path, recipe: Recipe, runtime: Runtime, hours: ProcessHours | None = None) -> None:
    """Write the status and the config of the run."""
    run = replace(recipe.run, lanes=runtime.lanes.num_lanes, name=path.name)
    replace_text(path / STATUS, _status("running", runtime, hours=hours))
    replace_text(path / CONFIG, to_yaml(replace(recipe, run=run)))  # type: ignore[type-var]


def _status(state: str, runtime: Runtime, why: str = "", hours: ProcessHours | None = None) -> str:
    values = {"state": state, "job": runtime.job_id, "processes": runtime.size, "why": why}
    return json.dumps(values | (hours.as_json() if hours else {}), indent=2)


@contextmanager
def _user_facing_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error}.", "Choose another directory with --run.runs-dir."
        ) from None


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved config as yaml for the run directory."""
    header = {"format": FORMAT, "lockstep": __version__, "recipe": recipe.name}
    settings = as_dict(recipe)
    settings["run"].pop("allow_other_machine")  # a permission for one resume
    return str(yaml.safe_dump(header | settings, sort_keys=False))


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the recipe name and the settings of a run directory."""
    for name, what in SEVERAL_RUNS.items():
        if (path / name).is_file():
            raise ConfigError(f"{path} is {what}.", f"Name one of its runs: lockstep ls {path}")
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} is not a run directory: it has no {CONFIG}.", "List the runs with `lockstep ls`.")
    values = config_without_version(read_yaml(path / CONFIG), path / CONFIG)
    values.pop("lockstep", None)
    recipe = values.pop("recipe", "")
    name = recipe if isinstance(recipe, str) else f"({type(recipe).__name__})"
    check_text(name, f"the recipe in {path / CONFIG}")
    if not isinstance(values.get("run", {}), dict):
        raise ConfigError(
            f"{path / CONFIG} has no settings of the run under 'run'.", "Fix the file, or start a new run."
        )
    # The directory may have been moved or copied: use its current path.
    location = {"runs_dir": str(path.resolve().parent), "name": path.resolve().name}
    return name, values | {"run": values.get("run", {}) | location}


def read_task_spec(run: Path) -> dict[str, Any] | None:
    """Return the description of the task in a run directory. None: the run has none."""
    try:
        values = read_json(run / TASK)
    except FileNotFoundError:
        return None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", f"Remove {run / TASK}: the task is then built instead.") from None
    return dict(values) if isinstance(values, dict) else {}
