"""Segments: what only grows is written once, at the first save after it came, and linked into every later checkpoint.

So a save costs what was added since the one before it, and every checkpoint is a whole directory nonetheless: deleting
one takes nothing from the others. A link is a second name for the same file, so a segment that a disk damages is
damaged in all of them. Each has a parity file, from which it is repaired in all of them.
"""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lockstep.checkpoint import format as form
from lockstep.checkpoint.tensorfile import write_tensor_file
from lockstep.protocols import AppendOnlyTensor, StateDict

MERGE = 256
"""After so many saves the segments since the last merge are written as one, so that a long run has no end of files.

Every row is then written twice in all, where the number of files would otherwise grow with that of saves."""
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class IncrementalState:
    """Which rows the last published checkpoint holds, in which files, and what the save under way adds to them."""

    def __init__(self, parity: bool = True) -> None:
        self._parity = parity
        """Whether segments get a parity file, from which damage is repaired."""
        self.rows = [0, 0]
        """First and stop of what is still there, at the save under way."""
        self.unlinked = False
        """Whether that one was given up because files of the last checkpoint could not be linked; known to all."""
        self._since = 0
        """From which row on it writes them itself."""
        self._name, self._tensors = "", StateDict()
        """The file it writes; no name where nothing was added."""
        self._coming: dict[str, str] = {}
        """The files it will have."""
        self._files: dict[str, str] = {}
        """Those of the last checkpoint, with their hashes; known to the main process, which links them."""
        self._reached = 0
        """The rows before this one are in them."""
        self._merged = 0
        """From here on they are those of single saves."""
        self._saves = 0
        """How many these are."""

    def resume(self, files: Mapping[str, str], rows: list[int]) -> None:
        """Go on from a checkpoint that was restored."""
        self._files = {name: digest for name, digest in files.items() if form.segment_rows(name) is not None}
        self._reached, self._merged, self._saves = rows[1], rows[1], 0

    def stage(self, grown: Mapping[str, AppendOnlyTensor], lanes: range) -> None:
        """Copy the rows, by name, that the last checkpoint does not hold."""
        spans = {(rows.first, rows.stop) for rows in grown.values()} or {(0, 0)}
        if len(spans) > 1:
            raise ValueError(f"the rows of a run must grow in step, and these do not: {sorted(spans)[:3]}")
        ((first, stop),) = spans
        self.rows, self._name, self._tensors, self.unlinked = [first, stop], "", {}, False
        self._since = max(first, self._merged if self._merges else self._reached)
        if grown and (self._since < stop or not stop):  # a file of no rows says what there will be
            self._name = form.rows_file(lanes, self._since, stop)
            self._tensors = {name: rows.read(self._since, stop) for name, rows in grown.items()}

    def write(self, directory: Path) -> dict[str, str]:
        """Write what was copied, with its parity; the hashes of the files, by name."""
        if not self._name:
            return {}
        parity = directory / form.parity_file(self._name) if self._parity else None
        return write_tensor_file(directory / self._name, self._tensors, parity)

    def link(self, last: Path, directory: Path, files: dict[str, str], lanes: int) -> None:
        """On the main process: add the files of the last checkpoint that still hold rows to those of a new one."""
        self.unlinked = True
        for name, digest in self._files.items():
            if self._is_needed(name):
                _link(last / name, directory / name)
                files[name] = digest
        self._coming = {name: digest for name, digest in files.items() if form.segment_rows(name) is not None}
        for lane in range(lanes) if self._coming else ():
            form.segments(directory, self._coming, lane, self.rows)
        self.unlinked = False

    def commit(self) -> None:
        """Take note that the save under way was published."""
        self._merged, self._saves = (self.rows[1], 0) if self._merges else (self._merged, self._saves + 1)
        self._files, self._reached, self._tensors = self._coming, self.rows[1], {}

    def reset(self) -> None:
        """Write all rows anew at the next save: those of the last checkpoint cannot be linked."""
        self.resume({}, [0, 0])

    @property
    def _merges(self) -> bool:
        """Whether the save under way writes the segments of those before it once more, as one."""
        return self._saves + 1 >= MERGE

    def _is_needed(self, name: str) -> bool:
        """Whether a file holds rows that are still there and that the save under way does not write itself."""
        rows = form.segment_rows(name)
        return rows is not None and self.rows[0] < rows.stop <= self._since


def _link(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where the disk has no such thing."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
