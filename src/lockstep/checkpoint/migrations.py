"""Versions of the on-disk format, and functions that migrate older files to the current one.

config.yaml, manifest.json and train_state.json each contain `format`. A file of an older version passes through one
function per version, starting at OLDEST at the earliest. Files of other versions are rejected and left unchanged.

- 1: no `format` field.
- 2: `format`; the manifest names the machine and the library versions that wrote it, and may list parity files.
- 3: the names of Lockstep 0.2 for settings, tensors and files. Versions 1 and 2 predate the first release.

To change the format: add 1 to FORMAT, describe the version here, add a function to each table, and add a test with a
file of the previous version.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep import __version__
from lockstep.config import ConfigError

FORMAT = 3
"""The version that this Lockstep writes."""
OLDEST = 3
"""The oldest version that this Lockstep reads."""
Values = dict[str, Any]
Migration = Callable[[Values], Values]
"""Converts the values of one version to the next without changing its input."""
CLOCK_3 = frozenset(
    {
        *("total_samples", "samples", "iteration", "last_iteration_samples", "evaluation", "best", "evaluations"),
        *("evals_since_best", "patience", "eval_pending", "metrics", "metric_sums"),
    }
)
"""Clock fields of version 3. Fields added later have a default, which is used for older checkpoints."""


class UnknownFormat(ConfigError):
    """A file of another Lockstep version. It may be undamaged, so it must not be skipped, rewritten or deleted."""

    def __init__(self, problem: str, hint: str, version: int = 0) -> None:
        super().__init__(problem, hint)
        self.version = version


MANIFEST: Mapping[int, Migration] = {}
STATE: Mapping[int, Migration] = {}
CONFIG: Mapping[int, Migration] = {}


def migrate(table: Mapping[int, Migration], values: Mapping[str, Any], source: object) -> Values:
    """Convert the values of a file to the current format, without `format`.

    Args:
        table: The migrations of this kind of file, by the version they start from.
        values: The plain values as read.
        source: Path of the file, for messages.

    Raises:
        UnknownFormat: The file has a version newer than FORMAT or older than OLDEST.
        ValueError: `format` is not a version number.
    """
    current = dict(values)
    version = current.pop("format", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"{source} has format {str(version)[:100]!r}, which is not a version number")
    if version > FORMAT:
        raise UnknownFormat(
            f"{source} has format {str(version)[:30]}, and Lockstep {__version__} knows formats up to {FORMAT}.",
            "A newer Lockstep wrote it. Upgrade: pip install --upgrade lockstep-rl. Nothing was changed.",
            version,
        )
    if version < OLDEST:
        raise UnknownFormat(
            f"{source} has format {version}, and Lockstep {__version__} reads formats from {OLDEST} on.",
            "An older Lockstep wrote it. Use that version for this run, or train again. Nothing was changed.",
            version,
        )
    for step in range(version, FORMAT):
        current = table[step](current)
    return current


def migrate_config(values: Mapping[str, Any], path: object) -> Values:
    """Convert the settings of a run's config.yaml to the current format. Raises ConfigError if that is impossible."""
    try:
        return migrate(CONFIG, values, path)
    except UnknownFormat:
        raise
    except ValueError as error:
        raise ConfigError(f"{error}.", "Restore the file from a copy, or restore its format number.") from None


def complete_clock(clock: Mapping[str, Any], defaults: Mapping[str, Any], source: object) -> Values:
    """Add defaults for the fields that a saved clock does not have because they are newer.

    Raises:
        UnknownFormat: The clock has a field that this Lockstep does not know.
    """
    if unknown := sorted(clock.keys() - CLOCK_3 - defaults.keys()):
        raise UnknownFormat(
            f"{source} has the clock field {unknown[0][:100]!r}, which Lockstep {__version__} does not know.",
            "Another version of Lockstep wrote it. Use that version. Nothing was changed.",
        )
    return {name: value for name, value in defaults.items() if name not in CLOCK_3} | dict(clock)
