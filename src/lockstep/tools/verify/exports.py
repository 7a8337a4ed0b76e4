"""Which checkpoint an export comes from: recorded when it is written, and compared bit by bit by `lockstep verify`."""

from collections.abc import Iterable
from pathlib import Path

import safetensors

from lockstep.checkpoint import format as form
from lockstep.checkpoint.chain import entry_hash
from lockstep.checkpoint.errors import user_facing_errors
from lockstep.checkpoint.lineage import find, find_best
from lockstep.checkpoint.naming import CheckpointName
from lockstep.checkpoint.tensorfile import read_tensor_file
from lockstep.config import ConfigError
from lockstep.fork_record import run_id
from lockstep.io.jsonl import CHECKPOINTS, CONFIG
from lockstep.tools.verify.history import read_history

SHOWN = 3
"""Differing tensors that are named."""


def choose_checkpoint(run: Path, at: int | None) -> tuple[CheckpointName | None, dict[str, str]]:
    """Return the checkpoint to export, the best or the one at `at` samples, and a record of it for the export."""
    directory = run / CHECKPOINTS
    find_it = find_best(directory, form.verify_weights) if at is None else find(directory, at, form.verify_weights)
    name = find_it[0]
    if name is None:
        return None, {}
    with user_facing_errors(directory / str(name)):
        manifest = form.read_manifest(directory / str(name))
    return name, {"run": run_id(run), "checkpoint": str(name), "entry": entry_hash(manifest)}


def verify_export(export: Path, run: Path | None) -> tuple[list[str], bool]:
    """Find the checkpoint of an export and compare the weights. Return lines to print, and whether they are equal.

    Raises:
        ConfigError: The file cannot be read, has no record of its checkpoint, or its run is not found.
    """
    with user_facing_errors(export):
        weights = read_tensor_file(export, None)
        with safetensors.safe_open(export, framework="pt") as file:
            record = {str(key): str(value)[:200] for key, value in (file.metadata() or {}).items()}
    if "entry" not in record:
        raise ConfigError(
            f"{export} does not say which checkpoint it comes from.", "Export it again with this version of Lockstep."
        )
    samples = CheckpointName.parse(record.get("checkpoint", ""))
    path = run or _find_run(record.get("run", ""), [export.resolve().parent, *sorted(Path("runs").glob("*"))])
    if path is None:
        raise ConfigError(
            f"the run of {export} is neither its directory nor in runs.", "Name it: lockstep verify FILE --run RUN"
        )
    history = read_history(path)
    if history.problems:
        return [*history.problems, f"Refused. The chain of {path} is broken."], False
    entry = next((entry for entry in history.entries if entry.hash == record["entry"]), None)
    if entry is None:
        return [f"Refused. No checkpoint of {path} is the one that {export} names ({samples})."], False
    lines = [f"{export} names the checkpoint {entry.checkpoint} of {path}, which is in its chain."]
    if entry.hash not in history.kept:
        return [*lines, "Not verified. That checkpoint was deleted, so the weights cannot be compared."], False
    saved = form.strip_prefix(form.read_shared(history.kept[entry.hash]), "algorithm")
    different = [
        name
        for name, tensor in weights.items()
        if name not in saved or form.digest_tensor("", tensor) != form.digest_tensor("", saved[name])
    ]
    if different:
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        names = ", ".join(name[:100] for name in different[:SHOWN])
        return [*lines, f"Refused. Weights that differ from it: {names}{more}."], False
    return [
        *lines,
        f"Verified. All {len(weights)} tensors are bit-identical. The run itself: lockstep verify {path}",
    ], True


def _find_run(identity: str, candidates: Iterable[Path]) -> Path | None:
    return next((path for path in candidates if (path / CONFIG).is_file() and run_id(path) == identity != ""), None)
