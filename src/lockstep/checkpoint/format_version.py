"""Version of the on-disk format. Files of other versions are rejected and left unchanged.

config.yaml, manifest.json and train_state.json each contain `format`.

- 1: no `format` field.
- 2: `format`; the manifest names the machine and the library versions that wrote it, and may list parity files.
- 3: the names of Lockstep 0.2 for settings, tensors and files. Versions 1 and 2 predate the first release.

To change the format: add 1 to FORMAT, describe the version here, convert older values in `without_version`, and add a
test with a file of the previous version.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep import __version__
from lockstep.config import ConfigError

FORMAT = 3
"""The version that this Lockstep reads and writes."""


class UnknownFormat(ConfigError):
    """A file of another Lockstep version. It may be undamaged, so it must not be skipped, rewritten or deleted."""

    def __init__(self, problem: str, hint: str, version: int = 0) -> None:
        super().__init__(problem, hint)
        self.version = version


def without_version(values: Mapping[str, Any], source: object, invalid: Callable[[str], Exception]) -> dict[str, Any]:
    """Check the format version of a file; return its values without `format`.

    Args:
        values: The plain values as read.
        source: Path of the file, for messages.
        invalid: Creates the error for a `format` that is not a version number.

    Raises:
        UnknownFormat: The file has another version than FORMAT.
    """
    current = dict(values)
    version = current.pop("format", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise invalid(f"{source} has format {str(version)[:100]!r}, which is not a version number")
    if version > FORMAT:
        raise UnknownFormat(
            f"{source} has format {str(version)[:30]}, and Lockstep {__version__} knows formats up to {FORMAT}.",
            "A newer Lockstep wrote it. Upgrade: pip install --upgrade lockstep-rl. Nothing was changed.",
            version,
        )
    if version < FORMAT:
        raise UnknownFormat(
            f"{source} has format {version}, and Lockstep {__version__} reads formats from {FORMAT} on.",
            "An older Lockstep wrote it. Use that version for this run, or train again. Nothing was changed.",
            version,
        )
    return current


def config_without_version(values: Mapping[str, Any], path: object) -> dict[str, Any]:
    """Check the format version of a run's config.yaml. Raises ConfigError if this Lockstep cannot read it."""
    hint = "Restore the file from a copy, or restore its format number."
    return without_version(values, path, lambda problem: ConfigError(f"{problem}.", hint))
