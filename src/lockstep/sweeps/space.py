"""Search space of a sweep: a file with the range or the choices of each setting, checked against the recipe."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, Recipe, apply_overrides, as_dict, flat_settings, read_yaml

FIXED = ("run.total_samples", "run.name", "run.runs_dir", "run.lanes", "run.allow_other_machine")
"""Settings that are those of the sweep, or of the directory of a trial."""
RANGE_KEYS = ("low", "high", "log", "step")
MAX_SETTINGS, MAX_CHOICES = 100, 1000
EXAMPLE = "Write for example `algo.learning_rate: {low: 1e-5, high: 1e-2, log: true}` or `algo.gamma: [0.9, 0.99]`."


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included. Two integers are a range of integers."""

    low: float
    high: float
    log: bool = False
    """Sample the logarithm uniformly."""
    step: float | None = None
    """Distance between the numbers. None: all numbers, or all integers."""

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Choices:
    """Values of which one is chosen. They have no order."""

    values: tuple[Any, ...]


Space = dict[str, Range | Choices]
"""What each setting may be, by dotted name."""


def read_space(path: Path, recipe: Recipe) -> Space:
    """Read the file of a search space.

    Raises:
        ConfigError: The file cannot be read, or an entry is not valid for the recipe. The message names the setting.
    """
    return parse_space(read_yaml(path), recipe, str(path))


def parse_space(entries: Mapping[str, Any], recipe: Recipe, source: str) -> Space:
    """Check the entries of a search space. `source` is its file, for messages."""
    if not entries:
        raise ConfigError(f"{source} has no settings.", EXAMPLE)
    if len(entries) > MAX_SETTINGS:
        raise ConfigError(f"{source} has {len(entries):,} settings.", f"Use at most {MAX_SETTINGS}.")
    return {name.replace("-", "_"): _parse(name, entry, recipe, source) for name, entry in entries.items()}


def space_as_dict(space: Space) -> dict[str, Any]:
    """Return a space as the plain entries that `parse_space` reads."""
    entries: dict[str, Any] = {}
    for name, domain in space.items():
        if isinstance(domain, Choices):
            entries[name] = {"choices": list(domain.values)}
        else:
            entries[name] = {"low": domain.low, "high": domain.high, "log": domain.log, "step": domain.step}
    return entries


def space_from_record(entries: Mapping[str, Any]) -> Space:
    """Return the space in the file of a sweep without building its recipe. The file may be untrusted."""
    space: Space = {}
    for name, entry in entries.items():
        values: dict[str, Any] = entry if isinstance(entry, dict) else {}
        low: Any = values.get("low")
        high: Any = values.get("high")
        log, choices = values.get("log"), values.get("choices")
        if isinstance(choices, list) and 0 < len(choices) <= MAX_CHOICES:
            space[str(name)] = Choices(tuple(choices))
            continue
        numbers = all(type(value) in (int, float) and math.isfinite(value) for value in (low, high))
        if not numbers or low >= high or (log and low <= 0):
            raise ConfigError(f"the search space has no valid entry for {str(name)[:100]!r}.", "Restore the file.")
        space[str(name)] = Range(low=low, high=high, log=bool(log), step=values.get("step"))
    return space


def choice_key(value: Any) -> str | int | float | bool | None:
    """Return a choice as the plain value that Optuna and plots use: a list is written as JSON."""
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value)


def _parse(name: str, entry: Any, recipe: Recipe, source: str) -> Range | Choices:
    if name.replace("-", "_") in FIXED:
        raise ConfigError(f"{source}: {name} cannot be searched, because it belongs to the sweep.", "Remove it.")
    if isinstance(entry, list):
        entry = {"choices": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f"{source}: {name} is {str(entry)[:100]!r}, not a range or a list of choices.", EXAMPLE)
    if "choices" in entry:
        return _parse_choices(name, entry, recipe, source)
    unknown = [str(key) for key in entry if key not in RANGE_KEYS]
    if unknown or "low" not in entry or "high" not in entry:
        problem = f"has the unknown key {unknown[0][:100]!r}" if unknown else "has no low or no high"
        raise ConfigError(f"{source}: {name} {problem}.", EXAMPLE)
    return _parse_range(name, entry, recipe, source)


def _parse_choices(name: str, entry: Mapping[str, Any], recipe: Recipe, source: str) -> Choices:
    values = entry["choices"]
    if len(entry) > 1 or not isinstance(values, list) or not 0 < len(values) <= MAX_CHOICES:
        raise ConfigError(f"{source}: {name} must have 1 to {MAX_CHOICES:,} choices, and nothing else.", EXAMPLE)
    choices = tuple(_value(name, value, recipe, source) for value in values)
    if len({json.dumps(choice) for choice in choices}) < len(choices):
        raise ConfigError(f"{source}: {name} has the same choice twice.", "Remove one of them.")
    return Choices(choices)


def _parse_range(name: str, entry: Mapping[str, Any], recipe: Recipe, source: str) -> Range:
    low, high = (_value(name, entry[key], recipe, source) for key in ("low", "high"))
    log, step = entry.get("log", False), entry.get("step")
    numbers = all(type(value) in (int, float) and math.isfinite(value) for value in (low, high))
    if not numbers or low >= high:
        raise ConfigError(
            f"{source}: {name} has low {low!r} and high {high!r}.",
            "Use two numbers, low below high. Settings that are no numbers need choices.",
        )
    if type(log) is not bool:
        raise ConfigError(f"{source}: log of {name} is {str(log)[:100]!r}.", "Use true or false.")
    if log and low <= 0:
        raise ConfigError(f"{source}: {name} has low {low!r} on a log scale.", "Use a low above 0, or remove log.")
    if step is None:
        return Range(low=low, high=high, log=log)
    if log or type(step) not in (int, float, type(low)) or not 0 < step <= high - low:
        raise ConfigError(
            f"{source}: {name} has step {step!r}.", "Use a step above 0 and at most high - low, without log."
        )
    return Range(low=low, high=high, step=type(low)(step))


def _value(name: str, value: Any, recipe: Recipe, source: str) -> Any:
    """Return a value as the recipe stores it, such as 1e-5 for the text that yaml reads. Lists stay lists."""
    try:
        stored = flat_settings(as_dict(apply_overrides(recipe, {name: value}))).get(name.replace("-", "_"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return list(stored) if isinstance(stored, tuple) else stored
