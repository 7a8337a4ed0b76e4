"""Directories of new runs: reserve one that no other start uses, find that of a job, remove one that was not used."""

import itertools
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.bucket.urls import is_url
from lockstep.checkpoint.disk import DISK, Disk
from lockstep.config import ConfigError, Recipe, RecipeT, apply_overrides
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, HANG_REPORT, SEVERAL_RUNS, STATUS, read_status
from lockstep.launch.world import AUTO_JOB
from lockstep.run_name import automatic_name


def create_run(recipe: Recipe, status: str) -> Path:
    """Create the directory of a new run with its status file. No other start can get the same directory."""
    while True:
        path = reserve(recipe)
        try:
            DISK.create(path / STATUS, status)
            return path
        except FileExistsError:
            if recipe.run.name:
                require_unused(path)


def reserve(recipe: Recipe, disk: Disk = DISK) -> Path:
    """Create a directory for a run, or reuse an empty one with the requested name."""
    if is_url(recipe.run.runs_dir):
        raise ConfigError(
            f"run.runs_dir is {recipe.run.runs_dir}, but this needs a directory.",
            "In a bucket, train single runs: lockstep train RECIPE run.runs_dir=URL",
        )
    preferred = run_path(recipe)
    disk.make_all(preferred.parent)
    for number in itertools.count(1):
        path = preferred if number == 1 else preferred.with_name(f"{preferred.name}-{number}")
        try:
            disk.make_new(path)
            return path
        except FileExistsError:
            if recipe.run.name:
                require_unused(path)
                return path
    raise AssertionError("unreachable: itertools.count does not end")


@contextmanager
def reserved(recipe: RecipeT) -> Iterator[tuple[Path, RecipeT, str]]:
    """Reserve a directory and name the run after it. It is removed at the end if no training started there.

    Yields the directory, the named recipe, and a job ID for the processes that train it. In a bucket, nothing is
    reserved: the processes claim the name, and the job ID leads all their attempts to it.
    """
    if is_url(recipe.run.runs_dir):
        yield Path(recipe.run.name), recipe, uuid.uuid4().hex
        return
    path, job = reserve(recipe), uuid.uuid4().hex
    try:
        yield path, apply_overrides(recipe, {"run.name": path.name}), job
    finally:
        remove_if_unstarted(path, job)  # the launcher may have ended rank 0 before it could do that
        with suppress(OSError):
            if not any(path.iterdir()):  # rmdir would block on a frozen file system even if it cannot succeed
                path.rmdir()


def remove_if_unstarted(path: Path, job: str) -> None:
    """Remove the directory of a new run that failed before its training started. Keep the report of a hang.

    A start claims its run in the directory of checkpoints when task and algorithm are built. The job ID protects the
    directory of another start.
    """
    claimed = (path / CHECKPOINTS).is_dir() and any((path / CHECKPOINTS).iterdir())
    status = read_status(path)
    if status and status.get("job") == job and not claimed and not (path / HANG_REPORT).exists():
        removed = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
        with suppress(OSError):
            path.rename(removed)  # first, because other processes may still write to their logs
            shutil.rmtree(removed)


def run_of_job(recipe: Recipe, job: str) -> Path | None:
    """Return the run that a job started, also if its name was generated, so that restarts of the job find it."""
    if not job:
        return None
    named = [run_path(recipe)] if recipe.run.name else None
    for path in named or [path.parent for path in Path(recipe.run.runs_dir).glob(f"*/{STATUS}")]:
        status = read_status(path)
        if status.get("job") == job and not (job.startswith(AUTO_JOB) and status.get("state") == "finished"):
            return path
    return None


def run_path(recipe: Recipe) -> Path:
    """Return the path of a run: its name, or an automatic one."""
    return Path(recipe.run.runs_dir) / (recipe.run.name or automatic_name(recipe))


def require_unused(path: Path) -> None:
    """Raise ConfigError unless the directory of a new run is missing or empty, to protect existing files."""
    for name, what in {CONFIG: "a run", **SEVERAL_RUNS}.items():
        if (path / name).exists():
            raise ConfigError(
                f"{path} already contains {what.partition(' of ')[0]}.",
                f"Resume it: lockstep resume {path}\nOr choose another --run.name.",
            )
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        problem = "is a link" if path.is_symlink() else "is not empty" if path.is_dir() else "is a file"
        raise ConfigError(f"{path} {problem}, but a new run needs an empty directory.", "Choose another --run.name.")
