"""Versions of the on-disk format, and functions that bring older files up to the current one.

config.yaml, manifest.json and state.json each carry `format`. A file of an older version passes through one function
per version. A file of a newer version is refused: this Lockstep cannot know what it means, so it changes nothing.

- 1: no `format` field.
- 2: `format`; the manifest names the machine and the library versions that wrote it, and may list parity files.

To change the format: add 1 to FORMAT, describe the version here, add a function to each table, and add a test with a
file of the version before.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep import __version__
from lockstep.config import ConfigError

FORMAT = 2
"""The version that this Lockstep writes."""
Values = dict[str, Any]
Migration = Callable[[Values], Values]
"""From the values of one version to those of the next; the input is not changed."""
CLOCK_1 = frozenset(
    {
        *("budget", "samples", "iteration", "step", "evaluation", "best", "evaluations", "stale", "patience"),
        *("owes_evaluation", "metrics", "pending"),
    }
)
"""Clock fields of version 1. Fields that were added later have a default, which older checkpoints get."""


class UnknownFormat(ConfigError):
    """A file of another Lockstep. It may be whole: it must not be skipped as damaged, rewritten or deleted."""


def _manifest_1(values: Values) -> Values:
    return values | {"machine": {}}  # version 1 did not record it


def _same(values: Values) -> Values:
    return values


MANIFEST: Mapping[int, Migration] = {1: _manifest_1}
STATE: Mapping[int, Migration] = {1: _same}
CONFIG: Mapping[int, Migration] = {1: _same}


def migrate(table: Mapping[int, Migration], values: Mapping[str, Any], source: object) -> Values:
    """The values of a file in the current format, without `format`.

    Args:
        table: The migrations of this kind of file, by the version they start from.
        values: The plain values as read.
        source: Path of the file, for messages.

    Raises:
        UnknownFormat: The file is of a newer version.
        ValueError: `format` is not a version.
    """
    current = dict(values)
    version = current.pop("format", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(f"{source} has format {str(version)[:100]!r}, which is not a version")
    if version > FORMAT:
        raise UnknownFormat(
            f"{source} has format {str(version)[:30]}, and Lockstep {__version__} knows formats up to {FORMAT}.",
            "A newer Lockstep wrote it. Upgrade: pip install --upgrade lockstep-rl. Nothing was changed.",
        )
    for step in range(version, FORMAT):
        current = table[step](current)
    return current


def migrate_config(values: Mapping[str, Any], path: object) -> Values:
    """The settings of a run's config.yaml in the current format; ConfigError where they cannot be."""
    try:
        return migrate(CONFIG, values, path)
    except UnknownFormat:
        raise
    except ValueError as error:
        raise ConfigError(f"{error}.", "Restore the file from a copy, or write the format it had.") from None


def complete_clock(clock: Mapping[str, Any], defaults: Mapping[str, Any], source: object) -> Values:
    """A saved clock with the defaults of fields that were added after it was saved.

    Raises:
        UnknownFormat: The clock has a field that this Lockstep does not know.
    """
    if unknown := sorted(clock.keys() - CLOCK_1 - defaults.keys()):
        raise UnknownFormat(
            f"{source} has the clock field {unknown[0][:100]!r}, which Lockstep {__version__} does not know.",
            "Another version of Lockstep wrote it: use that version. Nothing was changed.",
        )
    return {name: value for name, value in defaults.items() if name not in CLOCK_1} | dict(clock)
