"""Fork a run: create a new run directory with a whole checkpoint of another run, from which training continues.

The directory is built under a temporary name and published by one rename. A kill at any time therefore leaves either no
fork or a complete one. The parent is only read, and may be training.
"""

import errno
import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.bucket.urls import is_url
from lockstep.bucket_copy import FIX, upload_new_run, url_of
from lockstep.checkpoint.copying import copy_checkpoint
from lockstep.checkpoint.disk import DISK
from lockstep.checkpoint.errors import READ_ERROR, CorruptCheckpointError
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.format import read_values, replace_text
from lockstep.checkpoint.lineage import best_checkpoint, find
from lockstep.checkpoint.naming import CheckpointName
from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe, as_dict, setting_differences
from lockstep.fork_record import ForkRecord, run_id
from lockstep.io.jsonl import CHANGES, CHECKPOINTS, CONFIG, DIGESTS, FORK, METRICS, STATUS, copy_until
from lockstep.io.temporary_directory import temporary_directory
from lockstep.run_dir import to_yaml
from lockstep.run_name import automatic_name
from lockstep.run_reservation import require_unused, reserve, run_path

NOT_RECORDED = ("run.name", "run.runs_dir", "run.lanes", "run.allow_other_machine")
"""Settings of the directory or of one start. They are not recorded as changes."""


@dataclass(frozen=True)
class Fork:
    """A new fork."""

    path: Path
    """Run directory. Of a fork in a bucket: the one from which it was uploaded, which no longer exists."""
    record: ForkRecord
    notes: list[str]
    """Messages for the user."""
    url: str | None = None
    """URL of a fork in a bucket."""

    @property
    def location(self) -> str:
        """Path or URL of the fork."""
        return self.url or str(self.path)

    @property
    def name(self) -> str:
        return self.location.rpartition("/")[2]


def create_fork(parent: Path, at: int | None, before: Recipe, recipe: Recipe) -> Fork:
    """Create a fork of a run, durably.

    Args:
        parent: The run to fork.
        at: Samples of its checkpoint. None: the newest undamaged one.
        before: Recipe of the parent.
        recipe: Recipe of the fork, validated. An empty `run.name` selects an automatic name.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or the fork cannot be written.
    """
    if is_url(recipe.run.runs_dir):
        return _create_in_bucket(parent, at, before, recipe)
    if recipe.run.name:
        require_unused(run_path(recipe))
    runs_dir = Path(recipe.run.runs_dir)
    try:
        DISK.make_all(runs_dir)
        with temporary_directory("fork", runs_dir) as temporary:
            copy = _Copy(temporary / "checkpoint", at)
            name, notes = find(parent / CHECKPOINTS, at, copy)
            if name is None:
                raise ConfigError(f"{parent} has no checkpoint to fork.", "Wait for its first save.")
            _require_samples_left(copy.path, parent, recipe)
            if not copy.linked:
                notes.append(f"Replay was copied: the file system of {runs_dir} has no hard links to {parent}.")
            changes = setting_differences(json.loads(json.dumps(as_dict(before))), recipe)
            changes = {key: values for key, values in changes.items() if key not in NOT_RECORDED}
            record = ForkRecord(
                url_of(parent) or str(parent.resolve()), run_id(parent), name.samples, copy.hash, changes
            )
            _fill(temporary / "run", copy.path, parent, name, record)
            return Fork(_publish(temporary / "run", recipe), record, notes)
    except OSError as error:
        raise ConfigError(
            f"the fork cannot be written to {runs_dir}: {error}.", "Choose another directory with --run.runs-dir."
        ) from None


def _create_in_bucket(parent: Path, at: int | None, before: Recipe, recipe: Recipe) -> Fork:
    """Create a fork in a temporary directory, and upload it."""
    automatic = recipe.run.name or automatic_name(recipe)

    def config(name: str) -> str:
        return to_yaml(replace(recipe, run=replace(recipe.run, name=name)))  # type: ignore[type-var]

    with temporary_directory("fork") as temporary:
        local = replace(recipe, run=replace(recipe.run, runs_dir=str(temporary), name=automatic))  # type: ignore[type-var]
        fork = create_fork(parent, at, before, local)
        try:
            url = upload_new_run(fork.path, recipe.run.runs_dir, automatic, not recipe.run.name, config)
        except OSError as error:
            raise ConfigError(f"the fork cannot be uploaded to {recipe.run.runs_dir}: {error}.", FIX) from None
        return replace(fork, url=url)


class _Copy:
    """A copy of one checkpoint. `lineage.find` calls it with one candidate after another."""

    def __init__(self, path: Path, at: int | None) -> None:
        self.path, self._at = path, at
        self.hash, self.linked = "", False

    def __call__(self, source: Path) -> None:
        """Copy and verify a checkpoint. Raises CorruptCheckpointError if it is damaged or was deleted meanwhile."""
        DISK.remove(self.path)
        self.path.mkdir()
        try:
            self.hash, self.linked = copy_checkpoint(source, self.path)
        except (OSError, CorruptCheckpointError) as error:
            if self._at is not None and not source.exists():
                raise ConfigError(
                    f"the checkpoint {source} was deleted while it was copied, because its run has newer ones.",
                    "Omit @SAMPLES to fork the newest checkpoint, or keep this one with --run.keep-every.",
                ) from None
            if isinstance(error, OSError) and source.exists():
                raise ConfigError(f"{source} cannot be copied to {self.path}: {error}.", READ_ERROR) from None
            raise


def _require_samples_left(checkpoint: Path, parent: Path, recipe: Recipe) -> None:
    """Raise ConfigError if a fork would end at once: its settings would have no effect."""
    clock = TrainState(**read_values(checkpoint)["clock"])
    clock.total_samples, clock.patience = recipe.run.total_samples, recipe.run.early_stop_patience
    if clock.eval_pending or not clock.done:
        return
    early = clock.samples < clock.total_samples
    limit = f"run.early_stop_patience {clock.patience}" if early else f"run.total_samples {clock.total_samples}"
    fix = "run.early_stop_patience=none" if early else f"run.total_samples={2 * clock.samples}"
    raise ConfigError(
        f"a fork of {parent} at {clock.samples} samples has nothing to train, because of {limit}.",
        f"Add {fix}, or fork an earlier checkpoint with RUN@SAMPLES.",
    )


def _fill(run: Path, checkpoint: Path, parent: Path, name: CheckpointName, record: ForkRecord) -> None:
    """Write a run directory with a checkpoint, the log up to it, and the claim of its first start."""
    run.mkdir()
    directory = run / CHECKPOINTS
    fence = GenerationFence(directory, main=True)
    fence.begin(None)
    fence.confirm(None, [])
    forked = str(CheckpointName(name.samples, fence.generation))
    DISK.rename(checkpoint, directory / forked)
    DISK.fsync_directory(directory)
    best = best_checkpoint(parent / CHECKPOINTS) == name
    for pointer in ("latest", *(["best"] if best else [])):
        replace_text(directory / pointer, forked)
    for log in (METRICS, DIGESTS, CHANGES):
        if (parent / log).is_file():
            copy_until(parent / log, run / log, name.samples)
    why = f"forked from {parent.resolve().name}, not trained yet"
    replace_text(run / STATUS, json.dumps({"state": "preempted", "job": "", "processes": 1, "why": why}, indent=2))
    replace_text(run / FORK, record.to_json())


def _publish(run: Path, recipe: Recipe) -> Path:
    """Rename a complete run directory to its final name, which is reserved as for every new run."""
    while True:
        path = reserve(recipe)
        named = replace(recipe, run=replace(recipe.run, name=path.name))  # type: ignore[type-var]
        try:
            replace_text(run / CONFIG, to_yaml(named))
            DISK.rename(run, path)  # replaces the empty directory; fails if another start has begun to use it
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                if recipe.run.name:
                    require_unused(path)
                continue
            with suppress(OSError):
                os.rmdir(path)
            raise
        DISK.fsync_directory(path.parent)
        return path
