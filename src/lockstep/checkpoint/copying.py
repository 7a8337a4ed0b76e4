"""Copy a checkpoint to another run: replay segments are hard-linked, because they never change."""

import stat
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint import format as form
from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.incremental import link_or_copy
from lockstep.checkpoint.tensorfile import check_file_size
from lockstep.io.durable import copy_file, fsync_dir


def copy_checkpoint(source: Path, target: Path) -> tuple[str, bool]:
    """Copy a checkpoint to an empty directory, durably. Verify the copy, because the source may be deleted meanwhile.

    Only replay segments and their parity files are linked: damage to a link affects both runs, and only segments can be
    repaired.

    Returns:
        The hash of the checkpoint, and whether all segments could be linked.

    Raises:
        CorruptCheckpointError: The source is damaged, or was deleted while it was copied.
        UnknownFormat: Another version of Lockstep wrote the checkpoint.
        OSError: A file could not be read or written.
    """
    linked = True
    for name in (*form.read_manifest(source)["files"], form.MANIFEST):
        path = form.resolve_member(source, name)
        with suppress(FileNotFoundError):  # found by the verification below
            if not stat.S_ISREG(path.stat().st_mode):
                continue
            if form.segment_rows(name) is not None:
                linked &= link_or_copy(path, target / name)
            else:
                check_file_size(path)
                copy_file(path, target / name)
    fsync_dir(target)
    try:
        return form.hash_checkpoint(target), linked
    except CorruptCheckpointError as damage:
        raise CorruptCheckpointError(str(damage).replace(str(target), str(source))) from None
