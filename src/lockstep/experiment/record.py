"""The file of an experiment: recipe, settings, seeds and command. It may be untrusted, so it is read strictly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, check_text
from lockstep.experiment.record_file import MAX_NUMBER, are_settings, format_values, is_count, is_text, read_values
from lockstep.io.jsonl import EXPERIMENT

MAX_SEEDS, MAX_PROCS = 1000, 4096
SEED_RUN = "--seed-run"
"""Internal first argument of `lockstep train` in the process of one seed. Experiment and seed follow."""


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord:
    """Contents of the file of an experiment."""

    recipe: str
    """Name of the recipe, or path of the file that defines it."""
    command: str
    """Command that started the experiment, for people."""
    seeds: tuple[int, ...]
    procs: int
    """Processes of each run."""
    init_from: str | None
    """Run whose weights all runs start from."""
    settings: Mapping[str, Any]
    """All settings of the recipe, by group. Seed, name and location are set for each run."""

    @property
    def total_samples(self) -> int:
        """Global samples that each run trains for."""
        return int(self.settings["run"]["total_samples"])


def is_experiment(directory: Path) -> bool:
    """Return whether a directory is that of an experiment."""
    return (directory / EXPERIMENT).is_file()


def run_directory(experiment: Path, seed: int) -> Path:
    """Return the run directory of a seed. Raise ConfigError for a link: a run must be inside its experiment."""
    path = experiment / f"seed-{seed}"
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link, but the runs of an experiment are directories in it.", "Replace it by its target."
        )
    return path


def format_record(record: ExperimentRecord) -> str:
    """Return the text of the file."""
    return format_values(asdict(record))


def read_experiment(experiment: Path) -> ExperimentRecord:
    """Read and check the file of an experiment.

    Raises:
        ConfigError: There is no such file, or a value in it is invalid.
    """
    path = experiment / EXPERIMENT
    values = read_values(path, f"{experiment} is not an experiment: it has no {EXPERIMENT}.", "an experiment")
    for key, is_valid in _CHECKS.items():
        if key not in values or not is_valid(values[key]):
            problem = "is invalid" if key in values else "is missing"
            raise ConfigError(f"{path} is not the file of an experiment: {key} {problem}.", "Restore the file.")
    for key in ("recipe", "command", "init_from"):
        check_text(values[key] or "", f"{key} in {path}")
    return ExperimentRecord(**{key: values[key] for key in _CHECKS} | {"seeds": tuple(values["seeds"])})


def describe_seeds(seeds: Sequence[int]) -> str:
    """Return seeds as short text: 0-4, or 3, 7."""
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds[:5])) + (", ..." if len(seeds) > 5 else "")


def overall_state(states: Sequence[str]) -> str:
    """Return the state of an experiment from those of its runs, of which `-` has not been started."""
    if all(state == "finished" for state in states):
        return "finished"
    return next((state for state in ("running", "failed", "preempted") if state in states), "incomplete")


def _are_seeds(value: object) -> bool:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_SEEDS:
        return False
    return all(type(seed) is int and 0 <= seed < MAX_NUMBER for seed in value) and len(set(value)) == len(value)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "recipe": is_text,
    "command": is_text,
    "seeds": _are_seeds,
    "procs": lambda value: is_count(value, MAX_PROCS),
    "init_from": lambda value: value is None or is_text(value),
    "settings": are_settings,
}
"""Keys of the file with the check of each value."""
