"""A checkpoint on disk: a directory of safetensors, a JSON of plain values, and a manifest with the hash of each file.

Loading a checkpoint cannot run code: tensors are safetensors, the rest is JSON, and file names that lead out of the
directory are rejected. File headers cannot trigger large allocations: small files have size limits. Tensors are memory
mapped, and copied only into tensors of the run that have the same shape and dtype.
"""

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.errors import CorruptCheckpointError as CorruptCheckpointError
from lockstep.checkpoint.errors import user_facing_errors as user_facing_errors
from lockstep.checkpoint.format_version import FORMAT as FORMAT
from lockstep.checkpoint.format_version import UnknownFormat, without_version
from lockstep.checkpoint.parity import repair
from lockstep.checkpoint.tensorfile import bytes_of, check_file_size, read_tensor_file, write_bytes, write_tensor_file
from lockstep.checkpoint.validation import check_values
from lockstep.io import safe_read
from lockstep.io.durable import fsync_dir
from lockstep.protocols import AppendOnlyTensor, LaneState, StateDict

MANIFEST, VALUES, SHARED = "manifest.json", "train_state.json", "shared.safetensors"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LANE_FILE = re.compile(r"lanes-(\d{1,9})-(\d{1,9})\.safetensors", re.ASCII)
_ROWS_FILE = re.compile(r"replay-(\d{1,9})-(\d{1,9})-(\d{1,18})-(\d{1,18})\.safetensors", re.ASCII)
_LOGGER = logging.getLogger("lockstep")


def lane_file(lanes: range) -> str:
    return f"lanes-{lanes.start:04d}-{lanes.stop - 1:04d}.safetensors"


def rows_file(lanes: range, first: int, stop: int) -> str:
    """Name of a segment: rows `first` up to `stop` of the append-only tensors of some lanes."""
    return f"replay-{lanes.start:04d}-{lanes.stop - 1:04d}-{first:012d}-{stop:012d}.safetensors"


def parity_file(segment: str) -> str:
    """Name of the parity file of a segment, from which a damaged segment is repaired."""
    return segment.removesuffix(".safetensors") + ".parity"


def lane_prefix(lane: int) -> str:
    """Prefix of the names of a lane's tensors."""
    return f"lane-{lane:04d}."


def write_tensors(path: Path, tensors: StateDict) -> str:
    """Write named tensors durably; return the SHA-256 of the bytes in memory, not of the file."""
    return write_tensor_file(path, tensors)[path.name]


def write_json(path: Path, value: Any) -> str:
    """Write plain values durably; return the SHA-256 of the bytes in memory, not of the file."""
    return write_bytes(path, [json.dumps(value, indent=1, sort_keys=True).encode()])


def replace_text(path: Path, text: str) -> None:
    """Replace a small file atomically: a reader sees either the old text or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a link that another user has planted
    with temporary.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_dir(path.parent)


def verify(directory: Path, replay: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint; with `replay=False`, all but its replay segments.

    A damaged segment is repaired from its parity file if possible. Parity files themselves are not checked.

    Returns:
        The manifest, in the current format.

    Raises:
        CorruptCheckpointError: A file differs from what was written.
        UnknownFormat: Another version of Lockstep wrote the checkpoint.
        OSError: A file could not be read, which is not damage.
    """
    manifest = read_manifest(directory)
    files = manifest["files"]
    for name in files:
        if segment_rows(name) is None or (replay and rows_of(name) is not None):
            check_file(directory, files, name)
    covered = 0  # the lane files hold lanes 0 to covered - 1
    for lanes in sorted(map(_lanes_in, files), key=lambda lanes: lanes.start):
        covered = lanes.stop if lanes.start == covered else covered
    values = read_values(directory)
    if covered < values["lanes"]:
        raise CorruptCheckpointError(f"{directory / MANIFEST} lists no file for lane {covered}")
    for lane in range(values["lanes"]) if "rows" in values and replay else ():
        segments(directory, files, lane, values["rows"])
    return manifest


def verify_weights(directory: Path) -> dict[str, Any]:
    """Check only the files that inference needs: the shared tensors and the clock."""
    manifest = read_manifest(directory)
    for name in (SHARED, VALUES):
        check_file(directory, manifest["files"], name)
    read_values(directory)
    return manifest


def check_file(directory: Path, files: Mapping[str, str], name: str) -> int:
    """Compare a file with its hash in the manifest; repair it if it has a parity file.

    Returns:
        Number of repaired blocks.

    Raises:
        CorruptCheckpointError: The file differs from what was written and cannot be repaired.
        OSError: The file could not be read, or the repair could not be written.
    """
    path, parity = resolve_member(directory, name), parity_file(name)
    if not _is_file(path):
        raise CorruptCheckpointError(f"{path} is missing")
    check_file_size(path)
    if digest_file(path) == files[name]:
        return 0
    if rows_of(name) is not None and parity in files and _is_file(resolve_member(directory, parity)):
        check_file_size(directory / parity)
        if blocks := repair(path, directory / parity, files[name]):
            _LOGGER.warning("Repaired %d damaged blocks of %s from its parity file.", blocks, path)
            return blocks
    raise CorruptCheckpointError(f"{path} is not what was written (its SHA-256 differs)")


def _is_file(path: Path) -> bool:
    """Return whether a regular file exists. Raises OSError if that is unknown, for example EACCES."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint in the current format: `files` and hashes, `keep`, `machine`, `chain`."""
    path = directory / MANIFEST
    manifest = read_json(path)
    # Check the checksum first: a damaged version, machine or file list must not be trusted.
    if isinstance(manifest, dict) and ("checksum" in manifest or manifest.get("format") == FORMAT):
        checksum = manifest.pop("checksum", None)
        if checksum != _checksum(manifest):
            raise CorruptCheckpointError(f"{path} is not what was written (its checksum differs)")
    manifest = without_version(manifest, path, CorruptCheckpointError) if isinstance(manifest, dict) else {}
    files = manifest.get("files")
    if not isinstance(files, dict) or not {SHARED, VALUES} <= files.keys():
        raise CorruptCheckpointError(f"{path} does not list the files of a checkpoint")
    if not isinstance(manifest.get("machine"), dict):
        raise CorruptCheckpointError(f"{path} does not record which machine wrote the checkpoint")
    return manifest


def write_manifest(
    directory: Path, files: dict[str, str], keep: bool, machine: dict[str, str], chain: dict[str, Any] | None = None
) -> None:
    """Write the manifest durably. Call this last, when every file that it lists is on disk."""
    manifest = {"format": FORMAT, "files": files, "keep": keep, "machine": machine}
    manifest |= {"chain": chain} if chain else {}
    write_json(directory / MANIFEST, manifest | {"checksum": _checksum(manifest)})


def _checksum(values: dict[str, Any]) -> str:
    """SHA-256 of plain values, independent of their order and layout in a file."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file."""
    try:
        with safe_read.open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing") from None
    except safe_read.UnreadableFileError as error:
        raise CorruptCheckpointError(str(error)) from None


def is_permanent(directory: Path) -> bool:
    """Return whether a checkpoint is permanent, that is, exempt from pruning (`run.keep_every`).

    A damaged or partly deleted checkpoint is not. One that cannot be read, or that another Lockstep version wrote, is:
    neither is a reason to delete it.
    """
    try:
        return bool(read_manifest(directory).get("keep"))
    except CorruptCheckpointError:
        return False
    except (OSError, UnknownFormat):
        return True


def resolve_member(directory: Path, name: str) -> Path:
    """Return the path of a file that a manifest lists. It must lie in the directory and not be a link."""
    path = directory / name
    if not _FILE.fullmatch(name) or path.is_symlink():
        raise CorruptCheckpointError(f"{directory / MANIFEST} names {name[:100]!r}, which leads out of the checkpoint")
    return path


def read_json(path: Path) -> Any:
    if path.is_symlink():
        raise CorruptCheckpointError(f"{path} is a link, which leads out of the checkpoint")
    try:
        return safe_read.read_json(path)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing") from None
    except safe_read.ReadFailed as failed:
        raise failed.error from None
    except safe_read.UnreadableFileError as error:
        raise CorruptCheckpointError(str(error)) from None


def read_values(directory: Path) -> dict[str, Any]:
    """Read and validate the plain values of a checkpoint: `clock`, `lanes`, `processes` and optionally `rows`."""
    path = directory / VALUES
    values = read_json(path)
    current = without_version(values, path, CorruptCheckpointError) if isinstance(values, dict) else {}
    return check_values(current, path)


def read_shared(directory: Path) -> StateDict:
    """Read the tensors that all lanes share."""
    return read_tensor_file(directory / SHARED, None)


def read_lane(
    directory: Path,
    lane: int,
    files: Iterable[str],
    rows: list[int] | None = None,
    live: Mapping[str, AppendOnlyTensor] | None = None,
) -> StateDict:
    """Read the tensors of one lane from the files that hold them.

    Args:
        directory: The checkpoint.
        lane: Global index of the lane.
        files: Names of the checkpoint's files.
        rows: First and stop of the replay rows, as in the checkpoint's values; None: skip replay.
        live: Append-only tensors of this lane in the run that loads the checkpoint. Saved ones with other names, shapes
            or dtypes, or with more rows than fit, are rejected before memory is allocated.
    """
    for name in files:
        if lane in _lanes_in(name):
            replay = read_rows(directory, lane, files, rows, live) if rows else {}
            return read_tensor_file(resolve_member(directory, name), lane_prefix(lane)) | replay
    raise CorruptCheckpointError(f"{directory} has no file that holds lane {lane}")


def read_rows(
    directory: Path,
    lane: int,
    files: Iterable[str],
    rows: list[int],
    live: Mapping[str, AppendOnlyTensor] | None = None,
) -> StateDict:
    """Read the append-only tensors of a lane: concatenate their segments and drop rows before `rows[0]`."""
    pieces: dict[str, list[Tensor]] = {}
    for name, start, stop in segments(directory, files, lane, rows):
        tensors = read_tensor_file(resolve_member(directory, name), lane_prefix(lane))
        if live is not None:
            _refuse_unfit(directory / name, tensors, live, rows)
        for key, tensor in tensors.items():
            if not tensor.dim() or len(tensor) != stop - start:
                raise CorruptCheckpointError(f"{directory / name} does not hold {stop - start} rows of {key[:100]}")
            pieces.setdefault(key, []).append(tensor[max(0, rows[0] - start) :])
    try:
        return {key: torch.cat(parts) for key, parts in pieces.items()}
    except (RuntimeError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{directory}: rows of lane {lane} do not fit together: {str(error)[:300]}"
        ) from None


def _refuse_unfit(path: Path, tensors: StateDict, live: Mapping[str, AppendOnlyTensor], rows: list[int]) -> None:
    """Compare the memory-mapped tensors of a segment with those of the run that loads them."""
    if tensors.keys() != live.keys():
        raise ValueError(f"{path} has other tensors than {', '.join(live)[:300]}.")
    for key, target in live.items():
        tensor, empty = tensors[key], target.read(target.first, target.first)
        if tensor.dtype != empty.dtype or tensor.shape[1:] != empty.shape[1:]:
            raise ValueError(
                f"{path}: a row of {key} was saved as {tensor.dtype} {tuple(tensor.shape[1:])} and is {empty.dtype} "
                f"{tuple(empty.shape[1:])} here.\nResume a run with the configuration it was started with."
            )
        if target.capacity is not None and rows[1] - rows[0] > target.capacity:
            raise ValueError(f"{path}: {rows[1] - rows[0]:,} rows were saved, and {target.capacity:,} fit this run.")


def segments(directory: Path, files: Iterable[str], lane: int, rows: list[int]) -> list[tuple[str, int, int]]:
    """List the files that hold a lane's rows as (name, first row, stop row), in order and without gaps."""
    first, stop = rows
    matches = [match for match in map(_ROWS_FILE.fullmatch, files) if match]
    spans = [(match[0], int(match[3]), int(match[4])) for match in matches if int(match[1]) <= lane <= int(match[2])]
    spans = sorted((span for span in spans if span[2] > first or span[2] == stop), key=lambda span: span[1:])
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    if not spans or starts[0] > first or ends[-1] != stop or starts[1:] != ends[:-1]:
        raise CorruptCheckpointError(f"{directory / MANIFEST} lists no files for rows {first} to {stop} of lane {lane}")
    return spans


def segment_rows(name: str) -> range | None:
    """Return the rows of a segment or of its parity file, from its name; None for other files."""
    return rows_of(name.removesuffix(".parity") + ".safetensors") if name.endswith(".parity") else rows_of(name)


def rows_of(name: str) -> range | None:
    """Return the rows of a segment, from its name; None for other files."""
    match = _ROWS_FILE.fullmatch(name)
    return range(int(match[3]), int(match[4])) if match else None


def lanes_of(name: str) -> range:
    """Return the lanes of a lane file or of a segment, from its name; empty for other files."""
    match = _LANE_FILE.fullmatch(name) or _ROWS_FILE.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def _lanes_in(name: str) -> range:
    """Return the lanes of a lane file, from its name; empty for other files."""
    match = _LANE_FILE.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def strip_prefix(state: StateDict, owner: str) -> StateDict:
    """Select the entries `owner.NAME` of a state, renamed to NAME."""
    return {name.removeprefix(f"{owner}."): tensor for name, tensor in state.items() if name.startswith(f"{owner}.")}


def add_prefix(**owners: LaneState) -> StateDict:
    """Merge the states of several owners under `owner.NAME`, copied to host memory, with all append-only rows."""
    return {
        f"{owner}.{name}": value.all() if isinstance(value, AppendOnlyTensor) else value.detach().to("cpu", copy=True)
        for owner, state in owners.items()
        for name, value in state.items()
    }


def digest_tensor(name: str, tensor: Tensor) -> str:
    """SHA-256 of a name and a tensor's dtype, shape and logical bytes, independent of strides and files."""
    sha256 = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    sha256.update(bytes_of(tensor.to("cpu")))
    return sha256.hexdigest()


def hash_checkpoint(directory: Path) -> str:
    """Hash a run: every tensor by sorted name, then the clock. Times, paths, generations and layout do not count."""
    files, values = verify(directory)["files"], read_values(directory)
    digests: dict[str, str] = {}
    for name in files:
        if name.endswith(".safetensors") and not _ROWS_FILE.fullmatch(name):
            tensors = read_tensor_file(directory / name, None)
            digests |= {key: digest_tensor(key, tensor) for key, tensor in tensors.items()}
    for lane in range(values["lanes"]) if "rows" in values else ():
        # Concatenated, because segment boundaries do not count.
        replay = read_rows(directory, lane, files, values["rows"], None)
        digests |= {lane_prefix(lane) + key: digest_tensor(lane_prefix(lane) + key, x) for key, x in replay.items()}
    sha256 = hashlib.sha256()
    for name in sorted(digests):
        sha256.update(digests[name].encode())
    sha256.update(json.dumps(values["clock"], sort_keys=True).encode())
    return sha256.hexdigest()
