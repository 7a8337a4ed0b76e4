"""Compare a repeated segment with the entry of the checkpoint at its end, which may have been deleted.

The entry has the SHA-256 of each file that was written. The repetition may have had another number of processes, which
put other lanes into a file. Its tensors are therefore arranged as in the original files before they are hashed.
"""

import hashlib
import json
from pathlib import Path

from lockstep.checkpoint import format as form
from lockstep.checkpoint.chain import Entry
from lockstep.checkpoint.tensorfile import digest_tensors, read_tensor_file
from lockstep.protocols import StateDict


def differing_files(entry: Entry, repeated: Path) -> list[str]:
    """Return the files of an entry that the repeated checkpoint would not have. Empty: they are bit-identical."""
    files = form.verify(repeated)["files"]
    values = form.read_values(repeated)
    lanes: StateDict = {}
    for name in files:
        if form.lanes_of(name) and form.rows_of(name) is None:
            lanes |= read_tensor_file(form.resolve_member(repeated, name), None)
    different = []
    for name, digest in entry.files.items():
        if name.endswith(".parity"):
            continue  # computed from its segment
        if name == form.SHARED:
            found = files[name]
        elif name == form.VALUES:
            found = _digest_values(repeated, entry.processes)
        elif (rows := form.rows_of(name)) is not None:
            found = _digest_rows(repeated, files, values.get("rows"), form.lanes_of(name), rows)
        else:
            found = digest_tensors(_lanes(lanes, form.lanes_of(name)))
        if found != digest:
            different.append(name)
    return different


def differing_tensors(original: Path, repeated: Path) -> list[str]:
    """Return the names of the tensors that differ between two checkpoints, without replay."""
    one, other = (_digests(path) for path in (original, repeated))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _digests(path: Path) -> dict[str, str]:
    names = [name for name in form.read_manifest(path)["files"] if name.endswith(".safetensors")]
    tensors: StateDict = {}
    for name in names:
        if form.rows_of(name) is None:
            tensors |= read_tensor_file(form.resolve_member(path, name), None)
    return {name: form.digest_tensor(name, tensor) for name, tensor in tensors.items()}


def _lanes(state: StateDict, lanes: range) -> StateDict:
    prefixes = tuple(map(form.lane_prefix, lanes))
    return {name: tensor for name, tensor in state.items() if name.startswith(prefixes)}


def _digest_values(repeated: Path, processes: int) -> str:
    """SHA-256 of the plain values, as the original number of processes would have written them."""
    values = form.read_json(repeated / form.VALUES) | {"processes": processes}
    return hashlib.sha256(json.dumps(values, indent=1, sort_keys=True).encode()).hexdigest()


def _digest_rows(repeated: Path, files: dict[str, str], held: list[int] | None, lanes: range, rows: range) -> str:
    """SHA-256 of a segment of replay. Empty if the repeated checkpoint does not hold its rows."""
    if held is None or rows.start < held[0] or rows.stop > held[1]:
        return ""
    tensors: StateDict = {}
    for lane in lanes:
        replay = form.read_rows(repeated, lane, files, held)
        tensors |= {
            form.lane_prefix(lane) + name: tensor[rows.start - held[0] : rows.stop - held[0]]
            for name, tensor in replay.items()
        }
    return digest_tensors(tensors)
