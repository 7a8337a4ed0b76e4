"""Upload the files of a working directory in the background: logs as parts, other files when they change.

Objects cannot be appended to. What was appended to a log since the last upload becomes a part of its own:

    metrics.jsonl.parts/GENERATION-SERIES-NUMBER

A series begins with the whole file. A new one begins with every start of the run, which may have removed lines that its
checkpoint does not cover, and after MAX_PARTS parts. Readers join the parts of the newest series.
"""

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.bucket.client import Bucket
from lockstep.io.jsonl import CHECKPOINTS, HEARTBEATS

SECONDS = 15.0
"""Seconds between two uploads of the main process."""
MAX_PARTS = 200
"""Parts of a series. The next one is written as a whole, which bounds the number of objects."""
PARTS = ".parts"
LOGS_OF_STARTS = ("logs/", "tensorboard/")
"""Folders in which files contain one start only: that of an earlier start is not part of a newer one."""
_LOGGER = logging.getLogger("lockstep")
_PART = re.compile(r"(?P<file>.+)\.parts/(?P<generation>\d{4,9})-(?P<series>\d{4,9})-(?P<number>\d{6,9})", re.ASCII)
_FILE = re.compile(r"(?!\.)[A-Za-z0-9_.@=+-]{1,200}(/(?!\.)[A-Za-z0-9_.@=+-]{1,200}){0,3}", re.ASCII)
"""Names that a download accepts. They must not lead out of its directory."""


@dataclass
class _Uploaded:
    """What the bucket has of one file."""

    stamp: tuple[int, int] = (0, 0)
    """Size and time of change."""
    size: int = 0
    series: int = -1
    parts: int = field(default=MAX_PARTS)


class Mirror:
    """Uploads the files of a directory that one process writes. `include` selects them by relative path."""

    def __init__(self, directory: Path, bucket: Bucket, include: Callable[[str], bool]) -> None:
        self.directory, self.bucket, self._include = directory, bucket, include
        self._generation = 0
        self._uploaded: dict[str, _Uploaded] = {}
        self._lock, self._finished = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, generation: int, before: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Start uploading every few seconds. If `before` returns true, nothing is uploaded any more."""
        self._generation = generation
        self._thread = threading.Thread(target=self._run, args=(before, seconds), name="uploads", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Upload what has changed. Raises OSError if the bucket does not answer."""
        with self._lock:
            for path in sorted(self.directory.rglob("*")):
                name = path.relative_to(self.directory).as_posix()
                if self._include(name) and is_run_file(name) and path.is_file() and not path.is_symlink():
                    with suppress(FileNotFoundError):  # removed by its writer meanwhile
                        self._upload(path, name)

    def stop(self) -> None:
        """Stop uploading in the background, when the current upload has ended."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, before: Callable[[], bool], seconds: float) -> None:
        failed = False
        while not self._finished.wait(seconds):
            try:
                if before():
                    return
                self.flush()
                failed = False
            except OSError as error:
                if not failed:
                    _LOGGER.warning("Logs are uploaded later, because the bucket does not answer: %s.", error)
                failed = True

    def _upload(self, path: Path, name: str) -> None:
        found = path.stat()
        stamp, known = (found.st_size, found.st_mtime_ns), self._uploaded.get(name, _Uploaded())
        if stamp == known.stamp:
            return
        if is_log(name):
            self._append(path, name, found.st_size, known)
        else:
            self.bucket.upload(path, name)
        known.stamp = stamp
        self._uploaded[name] = known

    def _append(self, path: Path, name: str, size: int, known: _Uploaded) -> None:
        begins = known.parts >= MAX_PARTS or size < known.size
        if size == known.size and not begins:
            return
        series, number, start = (known.series + 1, 0, 0) if begins else (known.series, known.parts, known.size)
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(size - start)
        self.bucket.put(f"{name}{PARTS}/{self._generation:04d}-{series:04d}-{number:06d}", content)
        known.series, known.parts, known.size = series, number + 1, start + len(content)
        if begins:
            parts = self.bucket.list(f"{name}{PARTS}").objects
            self.bucket.delete_many(f"{name}{PARTS}/{part}" for part in parts if self._is_obsolete(name, part, series))

    def _is_obsolete(self, name: str, part: str, series: int) -> bool:
        """Return whether a series that this process has begun replaces a part."""
        generation, part_series = (int(number) for number in part.split("-")[:2])
        if generation == self._generation:
            return part_series < series
        return generation < self._generation and not name.startswith(LOGS_OF_STARTS)


def is_log(name: str) -> bool:
    """Return whether a file of a run is only appended to."""
    return name.endswith((".jsonl", ".log")) or "tfevents" in name


def is_run_file(name: str) -> bool:
    """Return whether a file of a run is kept in the bucket by a mirror, and its name is valid."""
    return _FILE.fullmatch(name) is not None and not name.startswith((f"{CHECKPOINTS}/", f"{HEARTBEATS}/"))


def download(bucket: Bucket, directory: Path, select: Callable[[str], bool]) -> int:
    """Download the files of a run that a mirror has uploaded; join the parts of logs. Return their number."""
    plain: set[str] = set()
    parts: dict[str, dict[tuple[int, int], list[tuple[int, str]]]] = {}
    for key in bucket.find(""):
        match = _PART.fullmatch(key)
        name = match["file"] if match else key
        if not is_run_file(name) or not select(name):
            continue
        if match:
            series = parts.setdefault(name, {}).setdefault((int(match["generation"]), int(match["series"])), [])
            series.append((int(match["number"]), key))
        else:
            plain.add(name)
    for name in plain | parts.keys():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
    for name in plain:
        bucket.download(name, directory / name)
    for name, all_series in parts.items():
        with (directory / name).open("wb") as file:
            for key in _keys_in_order(name, all_series):
                file.write(bucket.read(key))
    return len(plain) + len(parts)


def _keys_in_order(name: str, all_series: dict[tuple[int, int], list[tuple[int, str]]]) -> list[str]:
    """Return the keys of the parts that make up a log: of the newest series, for logs of starts of each generation."""
    newest = dict(sorted(all_series))  # the last series of each generation remains
    generations = sorted(newest) if name.startswith(LOGS_OF_STARTS) else [max(newest)]
    keys = []
    for generation in generations:
        for expected, (number, key) in enumerate(sorted(all_series[generation, newest[generation]])):
            if number != expected:  # later parts are useless without this one
                break
            keys.append(key)
    return keys
