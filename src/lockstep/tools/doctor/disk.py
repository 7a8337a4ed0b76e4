"""Check that the run directory is writable, has enough free space and supports atomic renames."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.tools.doctor.finding import CheckResult, failure, ok, warning

_MIN_FREE_BYTES = 2 * 2**30


def check_disk(directory: Path) -> Iterator[CheckResult]:
    """Perform the file operations of a run in the run directory, and remove the files again."""
    parent = directory
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=parent) as scratch:
            yield from _check_file_operations(Path(scratch), directory)
    except OSError as error:
        yield failure(
            "disk",
            f"nothing can be written to {directory}: {error.strerror or error}",
            "Set run.runs_dir=/some/where, or fix the owner and permissions of the directory.",
        )
        return
    free = shutil.disk_usage(parent).free
    if free < _MIN_FREE_BYTES:
        yield failure(
            "disk",
            f"only {free / 2**20:.0f} MiB are free for runs in {directory}",
            "Free disk space, or set run.runs_dir=/some/where.",
        )
    else:
        yield ok("disk", f"{free / 2**30:.0f} GiB free for runs in {directory}")


def _check_file_operations(scratch: Path, directory: Path) -> Iterator[CheckResult]:
    """Test renames and hard links: checkpoints are renamed when complete, replay segments are linked."""
    (scratch / "new").mkdir()
    (scratch / "new" / "file").write_bytes(b"whole")
    with (scratch / "new" / "file").open("rb") as file:
        os.fsync(file.fileno())
    (scratch / "new").rename(scratch / "named")
    (scratch / "one").write_text("1")
    (scratch / "two").write_text("2")
    (scratch / "two").replace(scratch / "one")
    if (scratch / "one").read_text() != "2" or (scratch / "new").exists():
        yield failure(
            "disk",
            f"a rename in {directory} is not atomic",
            "Set run.runs_dir=/some/where to a local disk, NFS or Lustre.",
        )
        return
    try:
        os.link(scratch / "one", scratch / "linked")
    except OSError:
        yield warning(
            "disk",
            f"{directory} supports no hard links: checkpoints with replay are copied in full",
            "If saving takes long, keep runs on a file system with hard links (ext4, xfs, NFS).",
        )
    yield ok("disk", f"{directory} is writable, and renames in it are atomic")
