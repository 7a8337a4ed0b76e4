"""The run directory: one for a run, however many processes it has."""

import itertools
import json
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep import __version__
from lockstep.checkpoint import migrations
from lockstep.checkpoint.disk import DISK, Disk
from lockstep.checkpoint.fencing import SupersededError
from lockstep.checkpoint.format import digest_tensor, replace_text
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.checkpoint.snapshot import snapshot_lanes, snapshot_shared
from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe, as_dict, check_text, read_yaml
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, HEARTBEATS, STATUS, read_status
from lockstep.lanes import Lanes, partition_lanes
from lockstep.loggers.process_log import ProcessLog
from lockstep.loggers.run_logger import RunLogger, open_log
from lockstep.loggers.wandb_logger import require_wandb
from lockstep.protocols import Algorithm, VecEnv


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when training returns."""

    path: Path
    clock: TrainState
    seconds: float = 0.0
    """How long it took, since this start."""
    preempted: bool = False
    """Whether it was asked to stop before its end; it can go on from its last checkpoint."""


class RunDir:
    """Where a run writes: its config, its log, its checkpoints."""

    def __init__(
        self, path: Path, recipe: Recipe, runtime: Runtime, log: RunLogger | ProcessLog, presence: str
    ) -> None:
        self.path, self.log, self.runtime = path, log, runtime
        self._recipe, self._heartbeats = recipe, presence
        self.checkpoints = CheckpointManager(path / CHECKPOINTS, recipe.run, runtime)

    @classmethod
    @contextmanager
    def open(cls, recipe: Recipe, runtime: Runtime, resume: bool) -> Iterator["RunDir"]:
        """Make a fresh run directory, or go into the one that is to be resumed; the same one on every process."""
        place, lanes, presence = runtime.run_on_main(lambda: _prepare(recipe, runtime, resume))
        path = Path(place)
        _refuse_unshared(path / HEARTBEATS / presence, runtime)
        runtime.lanes = Lanes(lanes, partition_lanes(lanes, runtime.size)[runtime.rank], recipe.run.seed)
        runtime.watchdog.set_status_dir(path / HEARTBEATS / presence)
        log = open_log(path, recipe, runtime)
        run = cls(path, recipe, runtime, log, presence)
        try:
            yield run
        except BaseException as error:
            log.failed(error)
            runtime.watchdog.join_pending_save()
            # A resume that failed leaves the run as it was: somebody may be training it.
            if run.checkpoints.fence.settled or not resume:
                state = "superseded" if isinstance(error, SupersededError) else "failed"
                run.write_status(state, f"{type(error).__name__}: {error}")
            raise
        finally:
            log.close()

    def restore(
        self, algorithm: Algorithm, task: VecEnv, clock: TrainState, at: int | None = None, without_replay: bool = False
    ) -> None:
        """Load the newest checkpoint, or the one at so many samples, if any; from then on the run is this start's."""
        self.checkpoints.restore(algorithm, task, clock, at, without_replay)
        if self.runtime.is_main:
            with _user_facing_errors(self.path):
                _write_head(self.path, self._recipe, self.runtime)
                for other in (self.path / HEARTBEATS).iterdir():
                    if other.name != self._heartbeats:
                        shutil.rmtree(other, ignore_errors=True)
        self.log.begin(clock, self.checkpoints.notes)

    def write_status(self, state: str, why: str = "") -> None:
        """Write down how the run stands, for people and schedulers; the run that is now tells, nobody before it."""
        if self.runtime.is_main and (state == "superseded" or not self.checkpoints.fence.superseded()):
            path = self.path / (
                STATUS if state != "superseded" else f"superseded-{self.checkpoints.fence.generation:04d}.json"
            )
            with suppress(OSError):  # a bad disk is told of where it costs a checkpoint
                replace_text(path, _status(state, self.runtime, why))

    def write_log(self, clock: TrainState) -> None:
        """Write what was counted since the last entry, unless somebody else writes for this run now."""
        metrics = clock.flush_metrics()
        if not self.checkpoints.fence.superseded():
            self.log.write(clock, metrics)

    def finish(self, algorithm: Algorithm, task: VecEnv, clock: TrainState, preempted: bool) -> TrainResult:
        """Save a last time and say how the run ended, when every process knows that the checkpoint is whole."""
        self.checkpoints.save(algorithm, task, clock)
        self.checkpoints.finish()
        self.runtime.watchdog.end_deadlines()
        self.write_status("preempted" if preempted else "finished")
        if self.runtime.is_main:
            shutil.rmtree(self.path / HEARTBEATS, ignore_errors=True)
        result = TrainResult(self.path, clock, time.monotonic() - self.runtime.status.started, preempted)
        if not preempted:
            self.log.finish()
        return result

    def record_evaluation(
        self, clock: TrainState, evaluation: dict[str, float], algorithm: Algorithm, task: VecEnv
    ) -> None:
        """Note an evaluation; if it is the best so far, keep the agent that earned it."""
        best = clock.record_evaluation(evaluation)
        self.log.evaluation(clock)
        if best:
            self.checkpoints.save(algorithm, task, clock, best=True)

    def record_digests(self, clock: TrainState, algorithm: Algorithm, task: VecEnv) -> None:
        """Log a digest of every tensor of the run, so that two runs can be compared iteration by iteration."""
        runtime = self.checkpoints.runtime
        state = snapshot_shared(algorithm, task) | snapshot_lanes(algorithm, task, runtime.lanes.local)
        # Without the name, so that versions of Lockstep with other names can be compared.
        mine = {name: digest_tensor("", tensor)[:16] for name, tensor in state.items()}
        everybody: dict[str, str] = {}
        for digests in runtime.all_gather_json(mine):
            everybody |= digests
        self.log.digests(clock, everybody)


def _prepare(recipe: Recipe, runtime: Runtime, resume: bool) -> tuple[str, int, str]:
    """On the main process: the run's directory, its lanes, and where processes say how they are.

    A directory that holds a run is refused, unless this very job began it: then a host came or went, or a scheduler
    started the job again, and the run goes on. Of a run that is resumed nothing changes yet.
    """
    require_wandb(recipe.run)
    began = _begun_by(recipe, runtime.job_id)
    path, lanes = began or run_path(recipe), runtime.lanes.num_lanes
    presence = uuid.uuid4().hex[:8]
    with _user_facing_errors(path):
        if began is not None:
            if (path / CONFIG).exists():
                lanes = read_config(path)[1]["run"].get("lanes") or lanes  # a run keeps the number it began with
        elif resume:
            _refuse_links(path)
        else:
            path = create_run(recipe, _status("running", runtime))
            _write_head(path, recipe, runtime)
        (path / HEARTBEATS / presence).mkdir(parents=True)
    return str(path), lanes, presence


def create_run(recipe: Recipe, status: str) -> Path:
    """Create the directory of a new run, which no other start gets, with its status in it."""
    while True:
        path = reserve(recipe)
        try:
            DISK.create(path / STATUS, status)
            return path
        except FileExistsError:
            if recipe.run.name:
                require_unused(path)


def reserve(recipe: Recipe, disk: Disk = DISK) -> Path:
    """A new directory for a run, or an empty one that has the name it was given."""
    wanted = run_path(recipe)
    disk.make_all(wanted.parent)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            disk.make_new(path)
            return path
        except FileExistsError:
            if recipe.run.name:
                require_unused(path)
                return path
    raise AssertionError("there is always another number")


def _write_head(path: Path, recipe: Recipe, runtime: Runtime) -> None:
    """Write down whose run it is now, and with which settings."""
    run = replace(recipe.run, lanes=runtime.lanes.num_lanes, name=path.name)
    replace_text(path / STATUS, _status("running", runtime))
    replace_text(path / CONFIG, to_yaml(replace(recipe, run=run)))  # type: ignore[type-var]


def _status(state: str, runtime: Runtime, why: str = "") -> str:
    return json.dumps({"state": state, "job": runtime.job_id, "processes": runtime.size, "why": why}, indent=2)


@contextmanager
def _user_facing_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", "Choose another place with --run.runs-dir.") from None


def _begun_by(recipe: Recipe, job: str) -> Path | None:
    """The run that a job began, perhaps under a name of Lockstep's choosing, so that its restarts find it again."""
    if not job:
        return None
    if recipe.run.name:
        return run_path(recipe) if read_status(run_path(recipe)).get("job") == job else None
    there = Path(recipe.run.runs_dir)
    return next((path.parent for path in there.glob(f"*/{STATUS}") if read_status(path.parent).get("job") == job), None)


def _refuse_unshared(token: Path, runtime: Runtime) -> None:
    """Every process writes there: stop all of them if anybody does not see what the main one has just made."""
    if runtime.size == 1:
        return
    for process, (sees, host) in enumerate(runtime.all_gather_json([_appears(token), socket.gethostname()])):
        if not sees:
            raise ConfigError(
                f"process {process} on host {host} does not see {token.parent.parent.absolute()}.",
                "The run directory must be on storage that all hosts share: name such a place with --run.runs-dir.",
            )


def _appears(token: Path) -> bool:
    """Whether something is there, or comes to be seen within a few seconds."""
    for _ in range(50):
        if token.exists():
            return True
        time.sleep(0.1)
    return False


def run_path(recipe: Recipe) -> Path:
    """Where a run will be: under the name it was given, or under its recipe's and the time."""
    name = recipe.run.name or f"{Path(recipe.name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(recipe.run.runs_dir) / name


def require_unused(path: Path) -> None:
    """A new run needs a directory that is not there or is empty: whatever else is there is not ours to change."""
    if (path / CONFIG).exists():
        raise ConfigError(
            f"{path} already holds a run.", f"Go on with it: lockstep resume {path}\nOr choose another --run.name."
        )
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        what = "is a link" if path.is_symlink() else "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(f"{path} {what}, and a new run needs a directory of its own.", "Choose another --run.name.")


def _refuse_links(path: Path) -> None:
    """A run writes and deletes in its own directory: one from a stranger must not lead it anywhere else."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            mode = (Path(folder) / name).lstat().st_mode
            if stat.S_ISLNK(mode):
                raise ConfigError(
                    f"{Path(folder) / name} is a link, and a run writes nowhere but in its own directory.",
                    "Put what it leads to in its place, or remove it.",
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would make a reader or a writer wait
                raise ConfigError(f"{Path(folder) / name} is neither a file nor a directory.", "Remove it.")


def to_yaml(recipe: Recipe) -> str:
    """The resolved config as the yaml a run directory keeps."""
    head = {"format": migrations.FORMAT, "lockstep": __version__, "recipe": recipe.name}
    settings = as_dict(recipe)
    settings["run"].pop("allow_other_machine")  # a permission for one resume
    return str(yaml.safe_dump(head | settings, sort_keys=False))


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The recipe's name and the settings that a run directory holds."""
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is not a run directory: it has no {CONFIG}.", "`lockstep ls` lists the runs there are."
        )
    values = migrations.migrate_config(read_yaml(path / CONFIG), path / CONFIG)
    values.pop("lockstep", None)
    recipe = values.pop("recipe", "")
    name = recipe if isinstance(recipe, str) else f"({type(recipe).__name__})"
    check_text(name, f"the recipe in {path / CONFIG}")
    if not isinstance(values.get("run", {}), dict):
        raise ConfigError(f"{path / CONFIG} has no settings of the run under 'run'.", "Mend it, or train anew.")
    # The directory may have been moved or copied: where it stands now is its place.
    place = {"runs_dir": str(path.resolve().parent), "name": path.resolve().name}
    return name, values | {"run": values.get("run", {}) | place}
