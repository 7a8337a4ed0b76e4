"""Incremental saves: append-only rows are written once as a segment and hard-linked into every later checkpoint.

A save therefore costs only the rows added since the last one. Every checkpoint is still a complete directory, so
deleting one does not affect the others. All links share one file: damage to a segment affects all its checkpoints, and
a repair from its parity file repairs all of them.
"""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.checkpoint import format as form
from lockstep.checkpoint.tensorfile import write_tensor_file
from lockstep.io.durable import copy_file
from lockstep.protocols import AppendOnlyTensor, StateDict

MERGE = 256
"""Saves between merges. A merge writes all segments since the last merge again as one, which bounds the file count.

Each row is then written twice in total."""
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class IncrementalState:
    """Rows and files of the last published checkpoint, and what the current save adds to them."""

    def __init__(self, parity: bool = True) -> None:
        self._parity = parity
        """Whether each segment gets a parity file for repair."""
        self.rows = [0, 0]
        """First and stop of the rows that the current save holds."""
        self.unlinked = False
        """Whether the current save failed because segments could not be linked. Known to all processes."""
        self._since = 0
        """First row that the current save writes; earlier rows are linked."""
        self._name, self._tensors = "", StateDict()
        """The segment that the current save writes; no name if no rows were added."""
        self._current_files: dict[str, str] = {}
        """Segments of the current save, with their hashes."""
        self._files: dict[str, str] = {}
        """Segments of the last checkpoint, with their hashes. Only the main process, which links them, has these."""
        self._saved_stop = 0
        """The last checkpoint holds the rows before this one."""
        self._merged = 0
        """End of the last merged segment. Later rows are in one segment per save."""
        self._saves = 0
        """Saves since the last merge."""

    def resume(self, files: Mapping[str, str], rows: list[int]) -> None:
        """Continue from a restored checkpoint."""
        self._files = {name: digest for name, digest in files.items() if form.segment_rows(name) is not None}
        self._saved_stop, self._merged, self._saves = rows[1], rows[1], 0

    def stage(self, append_only: Mapping[str, AppendOnlyTensor], lanes: range) -> None:
        """Copy the rows that the last checkpoint does not hold to host memory."""
        spans = {(rows.first, rows.stop) for rows in append_only.values()} or {(0, 0)}
        if len(spans) > 1:
            raise ValueError(f"append-only tensors must grow in step and have equal row ranges: {sorted(spans)[:3]}")
        ((first, stop),) = spans
        self.rows, self._name, self._tensors, self.unlinked = [first, stop], "", {}, False
        self._since = max(first, self._merged if self._merges else self._saved_stop)
        if append_only and (self._since < stop or not stop):  # a segment without rows still records names and dtypes
            self._name = form.rows_file(lanes, self._since, stop)
            self._tensors = {name: rows.read(self._since, stop) for name, rows in append_only.items()}

    def write(self, directory: Path) -> dict[str, str]:
        """Write the copied rows and their parity file; return the file hashes by name."""
        if not self._name:
            return {}
        parity = directory / form.parity_file(self._name) if self._parity else None
        return write_tensor_file(directory / self._name, self._tensors, parity)

    def link(
        self,
        last: Path,
        directory: Path,
        files: dict[str, str],
        lanes: int,
        link_file: Callable[[Path, Path], object],
    ) -> None:
        """On the main process: link the segments of the last checkpoint that are still needed into a new one."""
        self.unlinked = True
        for name, digest in self._files.items():
            rows = form.segment_rows(name)
            # Needed if it holds current rows that the current save does not write itself.
            if rows is not None and self.rows[0] < rows.stop <= self._since:
                link_file(last / name, directory / name)
                files[name] = digest
        self._current_files = {name: digest for name, digest in files.items() if form.segment_rows(name) is not None}
        for lane in range(lanes) if self._current_files else ():
            form.segments(directory, self._current_files, lane, self.rows)
        self.unlinked = False

    def commit(self) -> None:
        """Record that the current save was published."""
        self._merged, self._saves = (self.rows[1], 0) if self._merges else (self._merged, self._saves + 1)
        self._files, self._saved_stop, self._tensors = self._current_files, self.rows[1], {}

    def reset(self) -> None:
        """Write all rows again at the next save, because segments of the last checkpoint cannot be linked."""
        self.resume({}, [0, 0])

    @property
    def _merges(self) -> bool:
        """Whether the current save merges the segments since the last merge."""
        return self._saves + 1 >= MERGE


def link_or_copy(source: Path, target: Path) -> bool:
    """Hard-link a file, or copy it if the file system does not support hard links. Return whether it was linked."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_file(source, target)
        return False
    return True
