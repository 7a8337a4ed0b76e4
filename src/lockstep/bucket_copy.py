"""Local copies of runs in a bucket for commands that read them, and new runs that a command has created."""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from lockstep.bucket.claim import claim_name
from lockstep.bucket.client import Bucket
from lockstep.bucket.mirror import Mirror, download
from lockstep.bucket.urls import is_run_name, is_url, join, split_run_url
from lockstep.bucket.working_directory import URL_FILE, cache_directory, working_directory
from lockstep.checkpoint import format as form
from lockstep.checkpoint.bucket_disk import BucketDisk
from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.lineage import best_checkpoint, list_checkpoints
from lockstep.checkpoint.naming import generation_file, generations
from lockstep.config import ConfigError
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, STATUS

Content = Literal["logs", "weights", "all"]
"""Files of a run that are copied: logs, config and status; also the weights of its checkpoints; or everything."""
FIX = "Check the name of the bucket, the credentials in the environment, and the network."


@contextmanager
def local_copy(url: str, content: Content) -> Iterator[Path]:
    """Copy a run, or the runs directly below a URL, to a directory that is removed afterwards."""
    parent, name = split_run_url(url)
    with working_directory(f"{name}-{uuid.uuid4().hex[:8]}") as directory:
        target = directory / name
        target.mkdir()
        try:
            if Bucket(parent).exists(f"{name}/{CONFIG}"):
                copy_run(url, target, content)
            else:
                copy_runs(url, target, content)
        except OSError as error:
            raise ConfigError(f"{url} cannot be read: {error}.", FIX) from None
        yield target


def copy_runs(url: str, target: Path, content: Content) -> None:
    """Copy all runs directly below a URL. Raises ConfigError if there are none."""
    runs = Bucket(url)
    names = [name for name in runs.list().folders if is_run_name(name) and runs.exists(f"{name}/{CONFIG}")]
    if not names:
        raise ConfigError(f"{url} is not a run, and contains none.", "List the folder above it: lockstep ls URL")
    for name in names:
        (target / name).mkdir()
        copy_run(join(url, name), target / name, content)


def copy_run(url: str, target: Path, content: Content) -> None:
    """Copy a run into an empty directory. Raises ConfigError if there is none."""
    bucket, checkpoints = Bucket(url), target / CHECKPOINTS
    try:
        found = download(bucket, target, lambda name: True)
    except OSError as error:
        raise ConfigError(f"{url} cannot be read: {error}.", FIX) from None
    if not found:
        raise ConfigError(f"{url} is not a run: it is empty.", "List the runs: lockstep ls URL")
    (target / URL_FILE).write_text(url)
    disk = BucketDisk(bucket, checkpoints)
    checkpoints.mkdir()
    names = disk.names(checkpoints)
    for generation in generations(names):
        path = generation_file(checkpoints, generation)
        path.write_text(disk.read_text(path))
        with suppress(CorruptCheckpointError, TypeError, KeyError, ValueError):
            began = float(disk.read_json(path)["began"])
            os.utime(path, (began, began))  # `ls` shows when the first one was created
    for pointer in {"latest", "best"} & set(names):
        (checkpoints / pointer).write_text(disk.read_text(checkpoints / pointer))
    for checkpoint in list_checkpoints(checkpoints, disk) if content != "logs" else ():
        with suppress(CorruptCheckpointError):  # deleted by the run meanwhile, or damaged, which readers report
            disk.fetch(checkpoints / str(checkpoint), *((range(0), False) if content == "weights" else ()))
    for lock in checkpoints.glob("*/.*.lock"):
        lock.unlink()


def url_of(run: Path) -> str | None:
    """Return the URL of a local copy; None for other directories, which may contain any file."""
    if run.resolve().is_relative_to(cache_directory().resolve()):
        with suppress(OSError):
            return (run / URL_FILE).read_text()
    return None


def upload_new_run(run: Path, runs_url: str, name: str, numbered: bool, config: Callable[[str], str]) -> str:
    """Upload a new run with its checkpoints, which a command has created locally. Return its URL.

    Args:
        run: The run. The files of its checkpoints are moved.
        runs_url: URL that contains the runs.
        name: Name of the run.
        numbered: Whether to add a number to a name that exists. Otherwise, it is refused.
        config: Returns the text of its config, for a name.
    """
    runs = Bucket(runs_url)
    status = json.loads((run / STATUS).read_text()) | {"start": uuid.uuid4().hex}
    chosen = claim_name(runs, name, numbered, status)
    bucket = runs.below(chosen)
    disk, checkpoints = BucketDisk(bucket, run / CHECKPOINTS), run / CHECKPOINTS
    best = best_checkpoint(checkpoints)
    for generation in generations(os.listdir(checkpoints)):
        path = generation_file(checkpoints, generation)
        disk.create(path, path.read_text())
    for checkpoint in list_checkpoints(checkpoints):
        path = checkpoints / str(checkpoint)
        disk.upload(path, form.read_manifest(path)["files"])
        disk.rename(path, path.with_name(str(checkpoint)))
        disk.replace(checkpoints / "latest", str(checkpoint))
        if checkpoint == best:
            disk.replace(checkpoints / "best", str(checkpoint))
    Mirror(run, bucket, lambda name: name != CONFIG).flush()
    bucket.put(CONFIG, config(chosen).encode())  # last: a run without it is not listed
    return join(runs.url, chosen)


def location_of(run: Path) -> dict[str, str]:
    """Return the settings that make a local copy train in its bucket again; none for other directories."""
    url = url_of(run)
    if url is None or not is_url(url):
        return {}
    parent, name = split_run_url(url)
    return {"run.runs_dir": parent, "run.name": name}
