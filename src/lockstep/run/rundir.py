"""The run directory: one for a run, however many processes it has."""

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep import __version__
from lockstep.config import ConfigError, Recipe, as_dict, read_yaml
from lockstep.protocols import Algorithm, Clock, VecEnv
from lockstep.run.checkpoints import Checkpoints, lanes_copy, shared_copy
from lockstep.run.format import digest_tensor, replace_text
from lockstep.run.log import Log, NullLog, open_log
from lockstep.run.records import CHECKPOINTS, CONFIG
from lockstep.runtime import Runtime


@dataclass(frozen=True)
class Result:
    """Where a run stands when training returns."""

    path: Path
    clock: Clock


class RunDir:
    """Where a run writes: its config, its log, its checkpoints."""

    def __init__(self, path: Path, recipe: Recipe, runtime: Runtime, log: Log | NullLog) -> None:
        self.path, self.log = path, log
        self.checkpoints = Checkpoints(path / CHECKPOINTS, recipe.run, runtime)

    @classmethod
    @contextmanager
    def open(cls, recipe: Recipe, runtime: Runtime, resume: bool) -> Iterator["RunDir"]:
        """Make a fresh run directory, or go into the one that is to be resumed; the same one on every process."""
        path = Path(runtime.from_main(lambda: str(_prepare(recipe, runtime, resume))))
        _refuse_unshared(path, runtime)
        log = open_log(path, recipe, runtime)
        try:
            yield cls(path, recipe, runtime, log)
        finally:
            log.close()

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
        mine = {name: digest_tensor(name, tensor)[:16] for name, tensor in state.items()}
        everybody: dict[str, str] = {}
        for digests in runtime.gather(mine):
            everybody |= digests
        self.log.digests(clock, everybody)


def _prepare(recipe: Recipe, runtime: Runtime, resume: bool) -> Path:
    """On the main process: make the directory and write the config; refuse one that already holds a run."""
    run = replace(recipe.run, lanes=runtime.lanes.count)
    path = path_of(recipe)
    if resume:
        _refuse_links(path)
    else:
        refuse_taken(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        replace_text(path / CONFIG, describe(replace(recipe, run=replace(run, name=path.name))))  # type: ignore[type-var]
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.", "Choose another place with --run.dir.") from None
    return path


def _refuse_unshared(path: Path, runtime: Runtime) -> None:
    """Every process writes there: the main one leaves a file, and stops all if anybody does not see it."""
    if runtime.size == 1:
        return
    token = path / str(runtime.from_main(lambda: _leave_token(path)))
    seen = runtime.gather([_appears(token), socket.gethostname()])
    if runtime.main:
        token.unlink(missing_ok=True)
    for process, (sees, host) in enumerate(seen):
        if not sees:
            raise ConfigError(
                f"process {process} on host {host} does not see {path.absolute()}.",
                "The run directory must be on storage that all hosts share: name such a place with --run.dir.",
            )


def _appears(token: Path) -> bool:
    """Whether a file is there, or comes to be seen within a few seconds."""
    for _ in range(50):
        if token.exists():
            return True
        time.sleep(0.1)
    return False


def _leave_token(path: Path) -> str:
    """The name of a new file that nobody has looked for yet: a network's disk may remember that it was not there."""
    for left in path.glob(".token-*"):
        left.unlink(missing_ok=True)
    name = f".token-{uuid.uuid4().hex}"
    (path / name).touch()
    return name


def path_of(recipe: Recipe) -> Path:
    """Where a run will be: under the name it was given, or under its recipe's and the time."""
    name = recipe.run.name or f"{Path(recipe.name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(recipe.run.dir) / name


def refuse_taken(path: Path) -> None:
    """A second start must not write over a run."""
    if (path / CONFIG).exists():
        raise ConfigError(
            f"{path} already holds a run.", f"Go on with it: lockstep resume {path}\nOr choose another --run.name."
        )


def _refuse_links(path: Path) -> None:
    """A run writes and deletes in its own directory: one from a stranger must not lead it anywhere else."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            if (Path(folder) / name).is_symlink():
                raise ConfigError(
                    f"{Path(folder) / name} is a link, and a run writes nowhere but in its own directory.",
                    "Put what it leads to in its place, or remove it.",
                )


def describe(recipe: Recipe) -> str:
    """The resolved config as the yaml a run directory keeps."""
    head = {"lockstep": __version__, "recipe": recipe.name}
    return str(yaml.safe_dump(head | as_dict(recipe), sort_keys=False))


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The recipe's name and the settings that a run directory holds."""
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"{path} is not a run directory: it has no {CONFIG}.", "`lockstep ls` lists the runs there are."
        )
    values = read_yaml(path / CONFIG)
    values.pop("lockstep", None)
    name = str(values.pop("recipe", ""))
    if not isinstance(values.get("run", {}), dict):
        raise ConfigError(f"{path / CONFIG} has no settings of the run under 'run'.", "Mend it, or train anew.")
    # The directory may have been moved or copied: where it stands now is its place.
    place = {"dir": str(path.resolve().parent), "name": path.resolve().name}
    return name, values | {"run": values.get("run", {}) | place}
