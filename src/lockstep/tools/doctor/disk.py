"""The directory that runs are kept in: writable, roomy, and renames in it are whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.tools.doctor.finding import CheckResult, failure, ok, warning

_ROOM = 2 * 2**30


def check_disk(directory: Path) -> Iterator[CheckResult]:
    """Do in the run directory what a run does there, and leave nothing behind."""
    parent = directory
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=parent) as scratch:
            yield from _exercise(Path(scratch), directory)
    except OSError as error:
        yield failure(
            "disk",
            f"nothing can be written to {directory}: {error.strerror or error}",
            "Choose another directory: run.runs_dir=/some/where, or mend its owner and rights.",
        )
        return
    free = shutil.disk_usage(parent).free
    if free < _ROOM:
        yield failure(
            "disk",
            f"{free / 2**20:.0f} MiB are free for runs in {directory}",
            "Make room, or set run.runs_dir=/some/where.",
        )
    else:
        yield ok("disk", f"{free / 2**30:.0f} GiB free for runs in {directory}")


def _exercise(scratch: Path, directory: Path) -> Iterator[CheckResult]:
    """A checkpoint is a directory that is renamed when it is whole; replay segments are linked."""
    (scratch / "new").mkdir()
    (scratch / "new" / "file").write_bytes(b"whole")
    descriptor = os.open(scratch / "new" / "file", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    (scratch / "new").rename(scratch / "named")
    (scratch / "one").write_text("1")
    (scratch / "two").write_text("2")
    (scratch / "two").replace(scratch / "one")
    if (scratch / "one").read_text() != "2" or (scratch / "new").exists():
        yield failure(
            "disk",
            f"a rename in {directory} is not whole",
            "Keep runs on a local disk, NFS or Lustre: run.runs_dir=/some/where",
        )
        return
    try:
        os.link(scratch / "one", scratch / "linked")
    except OSError:
        yield warning(
            "disk",
            f"{directory} has no hard links: checkpoints with replay are copied whole",
            "Keep runs on a file system with links (ext4, xfs, NFS) if saving takes long.",
        )
    yield ok("disk", f"{directory} is writable, and renames in it are whole")
