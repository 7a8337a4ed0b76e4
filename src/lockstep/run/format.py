"""A checkpoint on disk: a directory of safetensors, a json of plain values, and a manifest with the hash of each file.

Nothing here can run code: tensors are safetensors, the rest is json, and a file name that leads out of the directory is
refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.protocols import State

MANIFEST, VALUES, SHARED = "manifest.json", "state.json", "shared.safetensors"
_LANE_FILE = re.compile(r"lanes-(\d+)-(\d+)\.safetensors")


class Damaged(Exception):
    """A checkpoint that must not be used: which file, and what is wrong with it."""


def lane_file(lanes: range) -> str:
    return f"lanes-{lanes.start:04d}-{lanes.stop - 1:04d}.safetensors"


def lane_prefix(lane: int) -> str:
    """How the names of a lane's tensors begin."""
    return f"lane-{lane:04d}."


def write_tensors(path: Path, tensors: State) -> str:
    """Write named tensors durably; return the SHA-256 of the file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return _settle(path)


def write_json(path: Path, value: Any) -> str:
    """Write plain values durably; return the SHA-256 of the file."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True))
    return _settle(path)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file in one step: a reader sees the old text or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    _settle(beside)
    os.replace(beside, path)


def _settle(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(directory: Path) -> Any:
    """The manifest of a checkpoint whose every file is as it was written; otherwise Damaged."""
    manifest = read_json(directory / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not {SHARED, VALUES} <= files.keys():
        raise Damaged(f"{directory / MANIFEST} does not list the files of a checkpoint")
    for name, digest in files.items():
        path = inside(directory, name)
        if not path.is_file():
            raise Damaged(f"{path} is missing")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise Damaged(f"{path} is not what was written (its SHA-256 differs)")
    held = 0  # lanes from the first one on
    for lanes in sorted(map(_lanes_in, files), key=lambda lanes: lanes.start):
        held = lanes.stop if lanes.start == held else held
    if held < read_json(directory / VALUES)["lanes"]:
        raise Damaged(f"{directory / MANIFEST} lists no file for lane {held}")
    return manifest


def is_milestone(directory: Path) -> bool:
    """Whether a checkpoint is to be kept for good; one that a kill left half deleted is not."""
    try:
        return bool(read_json(directory / MANIFEST)["keep"])
    except (Damaged, KeyError, TypeError):
        return False


def inside(directory: Path, name: str) -> Path:
    """The path of a file a manifest names, which must be a plain file of its directory."""
    path = directory / name
    if Path(name).name != name or name in ("", ".", "..") or path.is_symlink():
        raise Damaged(f"{directory / MANIFEST} names {name!r}, which leads out of the checkpoint")
    return path


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None


def read_shared(directory: Path) -> State:
    """The tensors all lanes share."""
    return _read(directory / SHARED, None)


def read_lane(directory: Path, lane: int, files: Iterable[str]) -> State:
    """The tensors of one lane, from whichever file holds it."""
    for name in files:
        if lane in _lanes_in(name):
            return _read(inside(directory, name), lane_prefix(lane))
    raise Damaged(f"{directory} has no file that holds lane {lane}")


def _lanes_in(name: str) -> range:
    """The lanes that a file of that name holds; none for other files."""
    match = _LANE_FILE.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def _read(path: Path, prefix: str | None) -> State:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if prefix is None or name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix or ""): file.get_tensor(name) for name in names}
    except (OSError, safetensors.SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from None


def split(state: State, owner: str) -> State:
    """The entries `owner.NAME` of a state, as NAME."""
    return {name.removeprefix(f"{owner}."): tensor for name, tensor in state.items() if name.startswith(f"{owner}.")}


def join(**owners: State) -> State:
    """States of several owners in one, under `owner.NAME`, copied to host memory."""
    return {
        f"{owner}.{name}": tensor.detach().to("cpu", copy=True)
        for owner, state in owners.items()
        for name, tensor in state.items()
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
    manifest = verify(directory)
    digests: dict[str, str] = {}
    for name in manifest["files"]:
        if name.endswith(".safetensors"):
            digests |= {key: digest_tensor(key, tensor) for key, tensor in _read(directory / name, None).items()}
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(digests[name].encode())
    whole.update(json.dumps(read_json(directory / VALUES)["clock"], sort_keys=True).encode())
    return whole.hexdigest()
