"""A checkpoint on disk: a directory of safetensors, a json of plain values, and a manifest with the hash of each file.

Nothing here can run code: tensors are safetensors, the rest is json, and a file name that leads out of the directory is
refused. Nor does anything here take memory because a file says so: small files have bounds, and tensors are mapped from
their file, to be copied into those of a run that have the same shape and kind.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import psutil
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep import reading
from lockstep.config import ConfigError
from lockstep.protocols import Clock, LaneState, Rows, State
from lockstep.run import migrations
from lockstep.run.migrations import FORMAT as FORMAT
from lockstep.run.migrations import UnknownFormat

MANIFEST, VALUES, SHARED = "manifest.json", "state.json", "shared.safetensors"
HEADER_BYTES = 16 * 2**20
"""What a file of tensors may say about them: enough for 100,000. Nothing but empty ones takes under 512 MiB."""
MEMORIES = 16
"""How many times this machine's memory a file may hold: a larger machine may have written it for several of these."""
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_LANE_FILE = re.compile(r"lanes-(\d{1,9})-(\d{1,9})\.safetensors", re.ASCII)
_ROWS_FILE = re.compile(r"rows-(\d{1,9})-(\d{1,9})-(\d{1,18})-(\d{1,18})\.safetensors", re.ASCII)


class Damaged(Exception):
    """A checkpoint that must not be used: which file, and what is wrong with it."""


def lane_file(lanes: range) -> str:
    return f"lanes-{lanes.start:04d}-{lanes.stop - 1:04d}.safetensors"


def rows_file(lanes: range, first: int, stop: int) -> str:
    """A segment: rows `first` up to `stop` of everything that grows on some lanes. It is written once, then linked."""
    return f"rows-{lanes.start:04d}-{lanes.stop - 1:04d}-{first:012d}-{stop:012d}.safetensors"


def lane_prefix(lane: int) -> str:
    """How the names of a lane's tensors begin."""
    return f"lane-{lane:04d}."


def write_tensors(path: Path, tensors: State) -> str:
    """Write named tensors durably; return the SHA-256 of the file."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except safetensors.SafetensorError as error:  # how it tells of a full disk
        raise OSError(f"{path}: {error}") from None
    return _settle(path)


def write_json(path: Path, value: Any) -> str:
    """Write plain values durably; return the SHA-256 of the file."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True))
    return _settle(path)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file in one step: a reader sees the old text or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    beside.unlink(missing_ok=True)  # a kill may have left it, or a stranger a link to somewhere else
    with beside.open("x") as file:
        file.write(text)
    _settle(beside)
    os.replace(beside, path)


def settle_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk, as `_settle` does for what is in a file."""
    if os.name == "nt":
        return  # Windows opens no directories, and keeps its names in a journal
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk of the network's that does not know how
            raise
    finally:
        os.close(directory)


def _settle(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(directory: Path) -> Any:
    """The manifest of a checkpoint whose every file is as it was written; otherwise Damaged."""
    manifest = read_manifest(directory)
    files = manifest["files"]
    for name, digest in files.items():
        path = inside(directory, name)
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        refuse_too_large(path)
        if _digest(path) != digest:
            raise Damaged(f"{path} is not what was written (its SHA-256 differs)")
    held = 0  # lanes from the first one on
    for lanes in sorted(map(_lanes_in, files), key=lambda lanes: lanes.start):
        held = lanes.stop if lanes.start == held else held
    values = read_values(directory)
    if held < values["lanes"]:
        raise Damaged(f"{directory / MANIFEST} lists no file for lane {held}")
    for lane in range(values["lanes"]) if "rows" in values else ():
        segments(directory, files, lane, values["rows"])
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint in the current format: `files` with their hashes, `keep`, `machine`."""
    path = directory / MANIFEST
    manifest = read_json(path)
    manifest = _migrated(migrations.MANIFEST, manifest, path) if isinstance(manifest, dict) else {}
    files = manifest.get("files")
    if not isinstance(files, dict) or not {SHARED, VALUES} <= files.keys():
        raise Damaged(f"{path} does not list the files of a checkpoint")
    if not isinstance(manifest.get("machine"), dict):
        raise Damaged(f"{path} does not say which machine wrote the checkpoint")
    return manifest


def write_manifest(directory: Path, files: dict[str, str], keep: bool, machine: dict[str, str]) -> None:
    """Write the manifest durably; it comes last, when every file it names is on disk."""
    write_json(directory / MANIFEST, {"format": FORMAT, "files": files, "keep": keep, "machine": machine})


def _migrated(table: Mapping[int, migrations.Migration], values: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return migrations.migrate(table, values, path)
    except UnknownFormat:
        raise
    except ValueError as error:
        raise Damaged(str(error)) from None


def refuse_too_large(path: Path) -> None:
    """A checkpoint was memory once: a file far beyond what a host has is refused before a byte of it is read."""
    size, memory = path.stat().st_size, psutil.virtual_memory().total
    if size > MEMORIES * memory:
        raise Damaged(f"{path} holds {size:,} bytes, and this machine has {memory:,} bytes of memory")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from None


def is_milestone(directory: Path) -> bool:
    """Whether a checkpoint is to be kept for good; one that a kill left half deleted is not.

    A checkpoint that cannot be read, or that another Lockstep wrote, is kept: neither is a reason to delete it.
    """
    try:
        return bool(read_manifest(directory).get("keep"))
    except Damaged:
        return False
    except (OSError, UnknownFormat):
        return True


def inside(directory: Path, name: str) -> Path:
    """The path of a file a manifest names, which must be a plain file of its directory."""
    path = directory / name
    if not _FILE.fullmatch(name) or path.is_symlink():
        raise Damaged(f"{directory / MANIFEST} names {name[:100]!r}, which leads out of the checkpoint")
    return path


def read_json(path: Path) -> Any:
    if path.is_symlink():
        raise Damaged(f"{path} is a link, which leads out of the checkpoint")
    try:
        return reading.read_json(path)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except reading.Unreadable as error:
        raise Damaged(str(error)) from None


def read_values(directory: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors: `clock`, `lanes`, `processes` and perhaps `rows`, of the right kinds."""
    path = directory / VALUES
    values = read_json(path)
    values = _migrated(migrations.STATE, values, path) if isinstance(values, dict) else {}
    clock = values.get("clock")
    if not isinstance(clock, dict):
        raise Damaged(f"{path} holds no clock")
    clock = values["clock"] = migrations.complete_clock(clock, asdict(Clock(budget=0)), path)
    for name in ("lanes", "processes"):
        if not _is_count(values.get(name)) or values[name] < 1:
            raise Damaged(f"{path} does not say how many {name} there were")
    rows = values.get("rows", [0, 0])
    if not (isinstance(rows, list) and len(rows) == 2 and all(map(_is_count, rows)) and rows[0] <= rows[1]):
        raise Damaged(f"{path} does not say which rows there were")
    kinds = get_type_hints(Clock)
    for field in fields(Clock):
        if field.name not in clock or not _fits(clock[field.name], kinds[field.name]):
            raise Damaged(f"{path} does not say the clock's {field.name}")
    if any(len(pair) != 2 for pair in clock["pending"].values()):
        raise Damaged(f"{path} does not say the clock's pending")
    return values


def _fits(value: Any, kind: Any) -> bool:
    """Whether a plain value is of the kind a field of the clock declares."""
    parts = get_args(kind)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(part, parts[1]) for part in value.values())
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(part, parts[0]) for part in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    if kind is float:
        return isinstance(value, float) or (_is_count(abs(value)) if isinstance(value, int) else False)
    return _is_count(value) if kind is int else isinstance(value, kind)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


@contextmanager
def said_in_words(path: Path) -> Iterator[None]:
    """While a checkpoint is put to use: it may be whole and still be none of this run's, or made to do harm."""
    try:
        yield
    except ConfigError:
        raise
    except Damaged as damage:
        raise ConfigError(
            f"{damage}.", "Start again: an older checkpoint is used where the newest is damaged."
        ) from None
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} cannot be used here: {words[:1000]}", _REMOVE.format(path)) from error


_REMOVE = "To go on from the checkpoint before it, remove {}."


def read_shared(directory: Path) -> State:
    """The tensors all lanes share."""
    return _read(directory / SHARED, None)


def read_lane(directory: Path, lane: int, files: Iterable[str], rows: list[int] | None = None) -> State:
    """The tensors of one lane, from whichever files hold them; `rows` as the checkpoint's values have them."""
    for name in files:
        if lane in _lanes_in(name):
            return _read(inside(directory, name), lane_prefix(lane)) | _read_rows(directory, lane, files, rows)
    raise Damaged(f"{directory} has no file that holds lane {lane}")


def _read_rows(directory: Path, lane: int, files: Iterable[str], rows: list[int] | None) -> State:
    """What grows on a lane, each tensor put together from its segments and cut to the rows that are still there."""
    pieces: dict[str, list[Tensor]] = {}
    for name, start, stop in segments(directory, files, lane, rows) if rows else ():
        for key, tensor in _read(inside(directory, name), lane_prefix(lane)).items():
            if not tensor.dim() or len(tensor) != stop - start:
                raise Damaged(f"{directory / name} does not hold {stop - start} rows of {key[:100]}")
            pieces.setdefault(key, []).append(tensor[max(0, (rows or [0])[0] - start) :])
    try:
        return {key: torch.cat(parts) for key, parts in pieces.items()}
    except (RuntimeError, TypeError) as error:
        raise Damaged(f"{directory}: rows of lane {lane} do not fit together: {str(error)[:300]}") from None


def segments(directory: Path, files: Iterable[str], lane: int, rows: list[int]) -> list[tuple[str, int, int]]:
    """The files that hold a lane's rows, with the numbers they begin and end at, one following the other."""
    first, stop = rows
    matches = [match for match in map(_ROWS_FILE.fullmatch, files) if match]
    spans = [(match[0], int(match[3]), int(match[4])) for match in matches if int(match[1]) <= lane <= int(match[2])]
    spans = sorted((span for span in spans if span[2] > first or span[2] == stop), key=lambda span: span[1:])
    starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
    if not spans or starts[0] > first or ends[-1] != stop or starts[1:] != ends[:-1]:
        raise Damaged(f"{directory / MANIFEST} lists no files for rows {first} to {stop} of lane {lane}")
    return spans


def rows_of(name: str) -> range | None:
    """The rows that a segment of that name holds; none for other files."""
    match = _ROWS_FILE.fullmatch(name)
    return range(int(match[3]), int(match[4])) if match else None


def _lanes_in(name: str) -> range:
    """The lanes that a file of that name holds; none for other files."""
    match = _LANE_FILE.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def _read(path: Path, prefix: str | None) -> State:
    try:
        refuse_too_large(path)
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > HEADER_BYTES:
            raise ValueError(f"it says {header:,} bytes about its tensors, more than the {HEADER_BYTES:,} it may")
        with safetensors.safe_open(path, framework="pt") as tensors:
            names = [name for name in tensors.keys() if prefix is None or name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix or ""): tensors.get_tensor(name) for name in names}
    except (OSError, safetensors.SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise Damaged(f"{path} cannot be read: {str(error).partition(chr(10))[0][:300]}") from None


def split(state: State, owner: str) -> State:
    """The entries `owner.NAME` of a state, as NAME."""
    return {name.removeprefix(f"{owner}."): tensor for name, tensor in state.items() if name.startswith(f"{owner}.")}


def join(**owners: LaneState) -> State:
    """States of several owners in one, under `owner.NAME`, copied to host memory, with all rows of what grows."""
    return {
        f"{owner}.{name}": value.all() if isinstance(value, Rows) else value.detach().to("cpu", copy=True)
        for owner, state in owners.items()
        for name, value in state.items()
    }


def digest_tensor(name: str, tensor: Tensor) -> str:
    """SHA-256 of a tensor's name, dtype, shape and logical bytes; strides and files do not matter."""
    tensor = tensor.detach().to("cpu").contiguous()
    head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
    # Strided anew, because a single element counts as contiguous whatever its stride, and then has no bytes to view.
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    return hashlib.sha256(head + flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def hash_checkpoint(directory: Path) -> str:
    """The hash of a run: every tensor by sorted name, then the clock; never times, paths, generations or layout."""
    files, values = verify(directory)["files"], read_values(directory)
    digests: dict[str, str] = {}
    for name in files:
        if name.endswith(".safetensors") and not _ROWS_FILE.fullmatch(name):
            digests |= {key: digest_tensor(key, tensor) for key, tensor in _read(directory / name, None).items()}
    for lane in range(values["lanes"]) if "rows" in values else ():
        grown = _read_rows(directory, lane, files, values["rows"])  # however saves have cut it into segments
        digests |= {lane_prefix(lane) + key: digest_tensor(lane_prefix(lane) + key, x) for key, x in grown.items()}
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(digests[name].encode())
    whole.update(json.dumps(values["clock"], sort_keys=True).encode())
    return whole.hexdigest()
