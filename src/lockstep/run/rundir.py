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
from lockstep.config import ConfigError, Recipe, as_dict, check_text, read_yaml
from lockstep.lanes import Lanes, deal
from lockstep.protocols import Algorithm, Clock, VecEnv
from lockstep.run import migrations
from lockstep.run.checkpoints import Checkpoints, lanes_copy, shared_copy
from lockstep.run.disk import DISK, Disk
from lockstep.run.fence import Outdated
from lockstep.run.format import digest_tensor, replace_text
from lockstep.run.log import Log, open_log
from lockstep.run.process_log import ProcessLog
from lockstep.run.records import CHECKPOINTS, CONFIG, PRESENCE, STATUS, read_status
from lockstep.run.wandb_log import refuse_missing
from lockstep.runtime import Runtime


@dataclass(frozen=True)
class Result:
    """Where a run stands when training returns."""

    path: Path
    clock: Clock
    seconds: float = 0.0
    """How long it took, since this start."""
    preempted: bool = False
    """Whether it was asked to stop before its end; it can go on from its last checkpoint."""


class RunDir:
    """Where a run writes: its config, its log, its checkpoints."""

    def __init__(self, path: Path, recipe: Recipe, runtime: Runtime, log: Log | ProcessLog, presence: str) -> None:
        self.path, self.log, self.runtime = path, log, runtime
        self._recipe, self._presence = recipe, presence
        self.checkpoints = Checkpoints(path / CHECKPOINTS, recipe.run, runtime)

    @classmethod
    @contextmanager
    def open(cls, recipe: Recipe, runtime: Runtime, resume: bool) -> Iterator["RunDir"]:
        """Make a fresh run directory, or go into the one that is to be resumed; the same one on every process."""
        place, lanes, presence = runtime.from_main(lambda: _prepare(recipe, runtime, resume))
        path = Path(place)
        _refuse_unshared(path / PRESENCE / presence, runtime)
        runtime.lanes = Lanes(lanes, deal(lanes, runtime.size)[runtime.rank], recipe.run.seed)
        runtime.watchdog.look_at(path / PRESENCE / presence)
        log = open_log(path, recipe, runtime)
        run = cls(path, recipe, runtime, log, presence)
        try:
            yield run
        except BaseException as error:
            log.failed(error)
            runtime.watchdog.let_save_finish()
            # A resume that failed leaves the run as it was: somebody may be training it.
            if run.checkpoints.fence.settled or not resume:
                state = "outdated" if isinstance(error, Outdated) else "failed"
                run.note_status(state, f"{type(error).__name__}: {error}")
            raise
        finally:
            log.close()

    def restore(
        self, algorithm: Algorithm, task: VecEnv, clock: Clock, at: int | None = None, without_replay: bool = False
    ) -> None:
        """Load the newest checkpoint, or the one at so many samples, if any; from then on the run is this start's."""
        self.checkpoints.restore(algorithm, task, clock, at, without_replay)
        if self.runtime.main:
            with _said_in_words(self.path):
                _write_head(self.path, self._recipe, self.runtime)
                for other in (self.path / PRESENCE).iterdir():
                    if other.name != self._presence:
                        shutil.rmtree(other, ignore_errors=True)
        self.log.begin(clock, self.checkpoints.notes)

    def note_status(self, state: str, why: str = "") -> None:
        """Write down how the run stands, for people and schedulers; the run that is now tells, nobody before it."""
        if self.runtime.main and (state == "outdated" or not self.checkpoints.fence.superseded()):
            path = self.path / (
                STATUS if state != "outdated" else f"outdated-{self.checkpoints.fence.generation:04d}.json"
            )
            with suppress(OSError):  # a bad disk is told of where it costs a checkpoint
                replace_text(path, _status(state, self.runtime, why))

    def write_log(self, clock: Clock) -> None:
        """Write what was counted since the last entry, unless somebody else writes for this run now."""
        metrics = clock.settle_metrics()
        if not self.checkpoints.fence.superseded():
            self.log.write(clock, metrics)

    def finish(self, algorithm: Algorithm, task: VecEnv, clock: Clock, preempted: bool) -> Result:
        """Save a last time and say how the run ended, when every process knows that the checkpoint is whole."""
        self.checkpoints.save(algorithm, task, clock)
        self.checkpoints.finish()
        self.runtime.watchdog.end_deadlines()
        self.note_status("preempted" if preempted else "finished")
        if self.runtime.main:
            shutil.rmtree(self.path / PRESENCE, ignore_errors=True)
        result = Result(self.path, clock, time.monotonic() - self.runtime.started, preempted)
        if not preempted:
            self.log.finish()
        return result

    def keep_best(self, clock: Clock, evaluation: dict[str, float], algorithm: Algorithm, task: VecEnv) -> None:
        """Note an evaluation; if it is the best so far, keep the agent that earned it."""
        best = clock.note_evaluation(evaluation)
        self.log.evaluation(clock)
        if best:
            self.checkpoints.save(algorithm, task, clock, best=True)

    def record_digests(self, clock: Clock, algorithm: Algorithm, task: VecEnv) -> None:
        """Log a digest of every tensor of the run, so that two runs can be compared iteration by iteration."""
        runtime = self.checkpoints.runtime
        state = shared_copy(algorithm, task) | lanes_copy(algorithm, task, runtime.lanes.local)
        # Without the name, so that versions of Lockstep with other names can be compared.
        mine = {name: digest_tensor("", tensor)[:16] for name, tensor in state.items()}
        everybody: dict[str, str] = {}
        for digests in runtime.gather(mine):
            everybody |= digests
        self.log.digests(clock, everybody)


def _prepare(recipe: Recipe, runtime: Runtime, resume: bool) -> tuple[str, int, str]:
    """On the main process: the run's directory, its lanes, and where processes say how they are.

    A directory that holds a run is refused, unless this very job began it: then a host came or went, or a scheduler
    started the job again, and the run goes on. Of a run that is resumed nothing changes yet.
    """
    refuse_missing(recipe.run)
    began = _begun_by(recipe, runtime.job)
    path, lanes = began or path_of(recipe), runtime.lanes.count
    presence = uuid.uuid4().hex[:8]
    with _said_in_words(path):
        if began is not None:
            if (path / CONFIG).exists():
                lanes = read_config(path)[1]["run"].get("lanes") or lanes  # a run keeps the number it began with
        elif resume:
            _refuse_links(path)
        else:
            path = create_run(recipe, _status("running", runtime))
            _write_head(path, recipe, runtime)
        (path / PRESENCE / presence).mkdir(parents=True)
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
                refuse_taken(path)


def reserve(recipe: Recipe, disk: Disk = DISK) -> Path:
    """A new directory for a run, or an empty one that has the name it was given."""
    wanted = path_of(recipe)
    disk.make_all(wanted.parent)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            disk.make_new(path)
            return path
        except FileExistsError:
            if recipe.run.name:
                refuse_taken(path)
                return path
    raise AssertionError("there is always another number")


def _write_head(path: Path, recipe: Recipe, runtime: Runtime) -> None:
    """Write down whose run it is now, and with which settings."""
    run = replace(recipe.run, lanes=runtime.lanes.count, name=path.name)
    replace_text(path / STATUS, _status("running", runtime))
    replace_text(path / CONFIG, describe(replace(recipe, run=run)))  # type: ignore[type-var]


def _status(state: str, runtime: Runtime, why: str = "") -> str:
    return json.dumps({"state": state, "job": runtime.job, "processes": runtime.size, "why": why}, indent=2)


@contextmanager
def _said_in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", "Choose another place with --run.dir.") from None


def _begun_by(recipe: Recipe, job: str) -> Path | None:
    """The run that a job began, perhaps under a name of Lockstep's choosing, so that its restarts find it again."""
    if not job:
        return None
    if recipe.run.name:
        return path_of(recipe) if read_status(path_of(recipe)).get("job") == job else None
    there = Path(recipe.run.dir)
    return next((path.parent for path in there.glob(f"*/{STATUS}") if read_status(path.parent).get("job") == job), None)


def _refuse_unshared(token: Path, runtime: Runtime) -> None:
    """Every process writes there: stop all of them if anybody does not see what the main one has just made."""
    if runtime.size == 1:
        return
    for process, (sees, host) in enumerate(runtime.gather([_appears(token), socket.gethostname()])):
        if not sees:
            raise ConfigError(
                f"process {process} on host {host} does not see {token.parent.parent.absolute()}.",
                "The run directory must be on storage that all hosts share: name such a place with --run.dir.",
            )


def _appears(token: Path) -> bool:
    """Whether something is there, or comes to be seen within a few seconds."""
    for _ in range(50):
        if token.exists():
            return True
        time.sleep(0.1)
    return False


def path_of(recipe: Recipe) -> Path:
    """Where a run will be: under the name it was given, or under its recipe's and the time."""
    name = recipe.run.name or f"{Path(recipe.name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(recipe.run.dir) / name


def refuse_taken(path: Path) -> None:
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


def describe(recipe: Recipe) -> str:
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
    place = {"dir": str(path.resolve().parent), "name": path.resolve().name}
    return name, values | {"run": values.get("run", {}) | place}
