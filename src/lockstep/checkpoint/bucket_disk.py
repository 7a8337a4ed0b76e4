"""Checkpoints of a run in a bucket, with the operations of a disk. The manifest is the commit.

Objects of a run, below its URL:

    checkpoints/attempt-0001.json              claim of a generation, created by one process only
    checkpoints/000000001024-g0001.json        manifest: the checkpoint exists if and only if this object does
    checkpoints/000000001024-g0001/...         the other files of that checkpoint
    checkpoints/segments/HASH-NAME             replay segments, uploaded once and named by the manifests that need them
    checkpoints/latest, checkpoints/best       pointers

Paths are those of the run's working directory, in which files are written before they are uploaded, and into which a
checkpoint is downloaded before it is loaded.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.bucket.client import Bucket
from lockstep.checkpoint import format as form
from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.naming import CheckpointName
from lockstep.io.jsonl import CHECKPOINTS
from lockstep.io.safe_read import JSON_BYTES, parse_json

SEGMENTS = "segments"
DOWNLOADS = 16
"""Files that are downloaded at a time."""
_NAME_IN = re.compile(r"\d{12,18}-g\d{4,9}", re.ASCII)
"""Finds the name of a checkpoint in that of its unfinished or deleted directory."""


class BucketDisk(Disk):
    """The checkpoints of one run. Background threads call it: a request may take long."""

    is_remote = True

    def __init__(self, bucket: Bucket, directory: Path) -> None:
        self.bucket, self.directory = bucket, directory
        self._folders: set[str] = set()
        """Names in the last listing that are directories for the caller."""
        self._claims: dict[Path, Any] = {}
        """Confirmed claims, which do not change any more."""

    # -- reading -------------------------------------------------------------------------------------------------------

    def names(self, directory: Path) -> list[str]:
        objects, folders = self.bucket.list(CHECKPOINTS)
        manifests = {name.removesuffix(".json") for name in objects}
        published = {name for name in manifests if CheckpointName.parse(name)}
        unfinished = {f".{name}.partial" for name in folders if CheckpointName.parse(name) and name not in published}
        self._folders = published | unfinished
        return [*(name for name in objects if name.removesuffix(".json") not in published), *self._folders]

    def is_directory(self, path: Path) -> bool:
        return path == self.directory or path.name in self._folders

    def exists(self, path: Path) -> bool:
        return CheckpointName.parse(path.name) is not None and self.bucket.exists(self._manifest(path))

    def read_text(self, path: Path) -> str:
        return self.bucket.read(self._key(path))[:JSON_BYTES].decode(errors="replace")

    def read_json(self, path: Path) -> Any:
        if path in self._claims:
            return self._claims[path]
        try:
            values = parse_json(self.read_text(path))
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path.name} is missing in {self.bucket.url}") from None
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.bucket.url}/{self._key(path)} is not valid: {error}") from None
        if isinstance(values, dict) and "parent" in values:
            self._claims[path] = values
        return values

    def verify(self, checkpoint: Path, replay: bool = True) -> None:
        self.fetch(checkpoint, None, replay)
        form.verify(checkpoint, replay)

    def is_milestone(self, checkpoint: Path) -> bool:
        try:
            self._fetch_manifest(checkpoint)
        except CorruptCheckpointError:
            return False
        return form.is_permanent(checkpoint)

    def fetch(self, checkpoint: Path, lanes: range | None = None, replay: bool = True) -> None:
        files = self._fetch_manifest(checkpoint)["files"]

        def fetch_file(name: str) -> None:
            target = form.resolve_member(checkpoint, name)
            with _locked(checkpoint, name):  # another process of this host may need the same file
                if not target.exists():
                    try:
                        self.bucket.download(self._object(checkpoint, name, files[name]), target)
                    except FileNotFoundError:
                        raise CorruptCheckpointError(f"{name} of {checkpoint.name} is missing") from None
            form.check_file(checkpoint, files, name)

        # The main process checks the files of all processes: several at a time, because each waits for the network.
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            for _ in pool.map(fetch_file, [name for name in files if _is_needed(name, lanes, replay)]):
                pass

    def release(self, checkpoint: Path) -> None:
        for path in (*checkpoint.glob("*.safetensors"), *checkpoint.glob(".*.lock")):
            path.unlink(missing_ok=True)  # a process that has mapped it keeps it

    # -- writing -------------------------------------------------------------------------------------------------------

    def make(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path, text: str) -> None:
        self.bucket.create(self._key(path), text.encode())

    def replace(self, path: Path, text: str) -> None:
        self.bucket.put(self._key(path), text.encode())

    def upload(self, partial: Path, files: Mapping[str, str]) -> None:
        for name, digest in files.items():
            path = partial / name
            self.bucket.upload(path, self._object(partial, name, digest))
            path.unlink()

    def link(self, source: Path, target: Path) -> None:
        """Nothing: the new manifest names the segment, which stays where it is."""

    def rename(self, source: Path, target: Path) -> None:
        if CheckpointName.parse(target.name):
            self.bucket.create(self._manifest(target), (source / form.MANIFEST).read_bytes())
            shutil.rmtree(source, ignore_errors=True)
        elif CheckpointName.parse(source.name):
            self.bucket.delete(self._manifest(source))
            shutil.rmtree(source, ignore_errors=True)

    def remove(self, path: Path) -> None:
        name = _NAME_IN.search(path.name)
        if name is None:
            self.bucket.delete(self._key(path))
        elif not self.bucket.exists(f"{CHECKPOINTS}/{name[0]}.json"):
            self.bucket.delete_all(f"{CHECKPOINTS}/{name[0]}")

    def remove_unreferenced(self, names: list[CheckpointName]) -> None:
        stored = self.bucket.find(f"{CHECKPOINTS}/{SEGMENTS}")
        if not stored:
            return
        for name in names:
            checkpoint = self.directory / str(name)
            files = self._fetch_manifest(checkpoint)["files"]
            for file, digest in files.items():
                stored.pop(self._object(checkpoint, file, digest), None)
        self.bucket.delete_many(stored)

    def fsync_directory(self, directory: Path) -> None:
        """Nothing: an object is durable when its request has succeeded."""

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _key(self, path: Path) -> str:
        return f"{CHECKPOINTS}/{path.relative_to(self.directory).as_posix()}"

    def _manifest(self, checkpoint: Path) -> str:
        return f"{CHECKPOINTS}/{checkpoint.name}.json"

    def _object(self, checkpoint: Path, name: str, digest: str) -> str:
        """Return the key of a file of a checkpoint, or of its unfinished directory."""
        if form.segment_rows(name) is not None:
            return f"{CHECKPOINTS}/{SEGMENTS}/{digest[:32]}-{name}"
        folder = _NAME_IN.search(checkpoint.name)
        assert folder is not None
        return f"{CHECKPOINTS}/{folder[0]}/{name}"

    def _fetch_manifest(self, checkpoint: Path) -> dict[str, Any]:
        checkpoint.mkdir(parents=True, exist_ok=True)
        path = checkpoint / form.MANIFEST
        if not path.exists():
            try:
                self.bucket.download(self._manifest(checkpoint), path)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{checkpoint.name} is missing in {self.bucket.url}") from None
        return form.read_manifest(checkpoint)


def _is_needed(name: str, lanes: range | None, replay: bool) -> bool:
    """Return whether a process with some lanes needs a file of a checkpoint; None: all lanes."""
    of_lanes = form.lanes_of(name)
    if lanes is not None and of_lanes and not set(of_lanes) & set(lanes):
        return False
    return replay or form.segment_rows(name) is None


@contextmanager
def _locked(directory: Path, name: str) -> Iterator[None]:
    """Lock a file that is downloaded, for the processes of this host."""
    lock = os.open(directory / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
