"""Files of experiments and sweeps: JSON with a format version. They may be untrusted, so they are read strictly."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.config import ConfigError
from lockstep.io.safe_read import UnreadableFileError, read_json, shallow

FORMAT = 1
"""Version of the files that this Lockstep reads and writes."""
MAX_NUMBER = 10**18


def format_values(values: Mapping[str, Any]) -> str:
    """Return the text of a file with these values, and its format version."""
    return json.dumps({"format": FORMAT, "lockstep": __version__, **values}, indent=1) + "\n"


def read_values(path: Path, missing: str, what: str) -> dict[str, Any]:
    """Return the values of a file with a format version.

    Args:
        path: The file.
        missing: Message if it does not exist.
        what: What it describes, such as a sweep, for messages.
    """
    try:
        if path.is_symlink():
            raise UnreadableFileError(f"{path} is a link")
        values = read_json(path)
    except FileNotFoundError:
        raise ConfigError(missing, "List runs, experiments and sweeps: lockstep ls") from None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Restore the file.") from None
    version = values.get("format") if isinstance(values, dict) else None
    if type(version) is int and FORMAT < version < MAX_NUMBER:
        raise ConfigError(
            f"{path} has format {version}, and Lockstep {__version__} knows formats up to {FORMAT}.",
            "A newer Lockstep wrote it. Upgrade: pip install --upgrade lockstep-rl",
        )
    if type(version) is not int or version != FORMAT:
        raise ConfigError(f"{path} is not the file of {what}: it has no valid format.", "Restore the file.")
    return dict(values)


def is_text(value: object) -> bool:
    """Return whether a value is a text of some length."""
    return isinstance(value, str) and 0 < len(value) <= 100_000


def is_count(value: object, limit: int = MAX_NUMBER) -> bool:
    """Return whether a value is a whole number from 1 to a limit."""
    return type(value) is int and 0 < value <= limit


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def are_settings(value: object) -> bool:
    """Return whether a value is the settings of a recipe, with a number of samples."""
    if not isinstance(value, dict) or not shallow(value) or not isinstance(run := value.get("run"), dict):
        return False
    return is_count(run.get("total_samples"))
