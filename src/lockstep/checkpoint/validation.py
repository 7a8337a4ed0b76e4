"""Validate the plain values of a checkpoint: a file with the right hash may still hold wrong types."""

from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from lockstep import __version__
from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.format_version import UnknownFormat
from lockstep.clock import TrainState


def check_values(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Validate the values of train_state.json in the current format, and return them."""
    clock, kinds = values.get("clock"), get_type_hints(TrainState)
    if not isinstance(clock, dict):
        raise CorruptCheckpointError(f"{path} holds no clock")
    if unknown := sorted(clock.keys() - kinds.keys()):
        raise UnknownFormat(
            f"{path} has the clock field {unknown[0][:100]!r}, which Lockstep {__version__} does not know.",
            "Another version of Lockstep wrote it. Use that version. Nothing was changed.",
        )
    for name in ("lanes", "processes"):
        if not _is_count(values.get(name)) or values[name] < 1:
            raise CorruptCheckpointError(f"{path} has no valid number of {name}")
    rows = values.get("rows", [0, 0])
    if not (isinstance(rows, list) and len(rows) == 2 and all(map(_is_count, rows)) and rows[0] <= rows[1]):
        raise CorruptCheckpointError(f"{path} has no valid range of rows")
    for name, kind in kinds.items():
        if name not in clock or not _fits(clock[name], kind):
            raise CorruptCheckpointError(f"{path} has no valid value for the clock's {name}")
    if any(len(pair) != 2 for pair in clock["metric_sums"].values()):
        raise CorruptCheckpointError(f"{path} has no valid value for the clock's metric_sums")
    return values


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a plain value has the type that a field of the clock declares."""
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
