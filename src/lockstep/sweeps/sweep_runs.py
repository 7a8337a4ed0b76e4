"""Create a sweep, and train its trials as subprocesses, as many at a time as fit on the machine."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lockstep.checkpoint.format import replace_text
from lockstep.config import ConfigError, Recipe, apply_overrides, as_dict, check_text
from lockstep.experiment.lock import locked
from lockstep.experiment.progress import RunsProgress
from lockstep.experiment.record_file import MAX_NUMBER
from lockstep.experiment.scheduler import RunScheduler, Start, start_lockstep
from lockstep.experiment.seed_runs import gpus_of_slot, runs_at_a_time
from lockstep.inference import build_recipe
from lockstep.io.jsonl import SWEEP
from lockstep.io.printable import printable
from lockstep.run_reservation import reserve
from lockstep.sweeps.optuna_study import require_optuna
from lockstep.sweeps.population import MIN_TRIALS, make_copy, require_changeable
from lockstep.sweeps.pruning import default_min_samples
from lockstep.sweeps.record import (
    DIRECTIONS,
    MAX_TRIALS,
    PRUNERS,
    SAMPLERS,
    SweepRecord,
    format_sweep,
    is_sweep,
    read_sweep,
    read_trials,
)
from lockstep.sweeps.space import parse_space, read_space, space_as_dict
from lockstep.sweeps.trial_runs import MakeCopy, TrialQueue, TrialRun, trial_recipe

BEST = "best.yaml"
"""File with all settings of the best trial, in the directory of a sweep."""
MAX_ETA = 1000
NOT_OF_A_NEW_RUN = ("name", "runs_dir", "lanes", "allow_other_machine", "record_video")
"""Settings of `run` that a sweep sets itself."""


@dataclass(frozen=True)
class SweepOutcome:
    """How the training of a sweep ended."""

    failed: Sequence[TrialRun]
    """Trials that ended with an error in all attempts, and need the user."""
    stopped: bool
    """Whether a signal ended training early. The runs have saved their state."""


def plan_sweep(
    recipe: Recipe,
    space: Path | Mapping[str, Any],
    *,
    trials: int,
    metric: str | None,
    direction: Literal["maximize", "minimize"],
    prune: str,
    min_samples: int | None,
    eta: int,
    sampler: str,
    seed: int,
    window: int,
    procs: int,
    command: str,
) -> SweepRecord:
    """Return the record of a new sweep of a validated recipe. Its fields are documented there.

    Raises:
        ConfigError: An argument or an entry of the search space is invalid.
    """
    recipe = apply_overrides(recipe, {"run.record_video": False})
    total = recipe.run.total_samples
    for name, value, choices in (
        ("prune", prune, PRUNERS),
        ("sampler", sampler, SAMPLERS),
        ("direction", direction, DIRECTIONS),
    ):
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}.", f"Use {', '.join(choices[:-1])} or {choices[-1]}.")
    for name, number, low, high in (
        ("trials", trials, 1, MAX_TRIALS),
        ("eta", eta, 2, MAX_ETA),
        ("window", window, 1, MAX_TRIALS),
        ("sweep-seed", seed, 0, MAX_NUMBER - 1),
        ("min-samples", min_samples or total, 1, total),
    ):
        if not low <= number <= high:
            raise ConfigError(f"--{name} is {number}.", f"Use a number from {low:,} to {high:,}.")
    parsed = read_space(space, recipe) if isinstance(space, Path) else parse_space(space, recipe, "the search space")
    if prune == "pbt":
        sampler = "random"  # all trials start together, before any result is known
        require_changeable(parsed, recipe)
        # Whole iterations, so that something is left to train after every rung.
        iteration = recipe.algo.samples_per_iteration(recipe.task)
        min_samples = -(-(min_samples or default_min_samples(prune, total, eta)) // iteration) * iteration
        if trials < MIN_TRIALS:
            raise ConfigError(f"--trials is {trials}.", "Population-based training needs 2 trials or more.")
    return SweepRecord(
        recipe=recipe.name,
        command=printable(command, newlines=False),
        settings=as_dict(recipe),
        space=space_as_dict(parsed),
        procs=procs,
        trials=trials,
        metric=metric,
        direction=direction,
        prune=prune,
        min_samples=min_samples or default_min_samples(prune, total, eta),
        eta=eta,
        sampler=sampler,
        seed=seed,
        window=window,
    )


def create_sweep(recipe: Recipe, record: SweepRecord) -> Path:
    """Create the directory of a new sweep. Its name is that of `run.name`, or an automatic one."""
    require_optuna()
    for name, value in (("the recipe", record.recipe), ("the command", record.command)):
        check_text(value, name)
    try:
        path = reserve(recipe).absolute()
        with locked(path, "sweep"):
            if is_sweep(path):  # another command has reserved the same name
                raise ConfigError(f"{path} already contains a sweep.", "Choose another --run.name.")
            replace_text(path / SWEEP, format_sweep(record))
    except OSError as error:
        raise ConfigError(
            f"{recipe.run.runs_dir} cannot be written: {error}.", "Choose another directory with --run.runs-dir."
        ) from None
    return path


def train_sweep(
    sweep: Path,
    procs: int | None = None,
    parallel: int | None = None,
    storage: str | None = None,
    skip_failed: bool = False,
    progress: RunsProgress | None = None,
    start: Start = start_lockstep,
    make_copy: MakeCopy = make_copy,
) -> SweepOutcome:
    """Train the trials of a sweep that are not decided: start or resume them. The results depend on no argument.

    Args:
        sweep: Directory of the sweep.
        procs: Processes of each trial. None: the number that the sweep was created with.
        parallel: Trials at a time. None: as many as the GPUs of the machine allow, or its cores if it has no GPU.
        storage: URL of a database for a copy of the study. None: only the file in the directory.
        skip_failed: Record trials as failed that end with an error in all attempts, instead of stopping before them.
        progress: Shows the progress. None: on standard error.
        start: Starts a subprocess.
        make_copy: Creates the run of a copy, for pbt.
    """
    require_optuna()
    record = read_sweep(sweep)
    procs = record.procs if procs is None else procs
    if procs < 1 or (parallel is not None and parallel < 1):
        raise ConfigError(f"--procs is {procs} and --parallel is {parallel}.", "Use at least 1 of each.")
    recipe = build_recipe(sweep / SWEEP, record.recipe, record.settings)
    gpus, at_a_time = runs_at_a_time(recipe.run.device, procs)
    with locked(sweep, "sweep"):
        queue = TrialQueue(sweep, record, procs, storage, skip_failed, make_copy)
        scheduler = RunScheduler[TrialRun](
            queue,
            prepare=lambda run, slot: run.prepare(gpus_of_slot(gpus, slot, procs)),
            record=queue.record,
            parallel=min(parallel or at_a_time, record.trials),
            progress=progress or RunsProgress(),
            start=start,
        )
        scheduler.run()
    return SweepOutcome(scheduler.failed, scheduler.stopped)


def add_trials(sweep: Path, trials: int) -> None:
    """Give a sweep a larger number of trials. It then equals one that was created with that number."""
    with locked(sweep, "sweep"):
        record = read_sweep(sweep)
        if record.prune == "pbt" and trials != record.trials:
            raise ConfigError(f"the population of {sweep} has {record.trials} trials.", "Start a new sweep with more.")
        if not record.trials <= trials <= MAX_TRIALS:
            raise ConfigError(
                f"--trials is {trials}, but {sweep} has {record.trials}.", f"Use a larger number, up to {MAX_TRIALS:,}."
            )
        replace_text(sweep / SWEEP, format_sweep(replace(record, trials=trials)))


def write_best(sweep: Path, number: int) -> Path:
    """Write all settings of a trial to a file for `lockstep train --config`, and return it."""
    record, trial = read_sweep(sweep), read_trials(sweep)[number]
    settings = as_dict(trial_recipe(sweep, record, trial, number))
    for key in NOT_OF_A_NEW_RUN:
        settings["run"].pop(key)
    path = sweep / BEST
    replace_text(path, yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False))
    return path
