"""Create an experiment, and train its runs as subprocesses, as many at a time as fit on the machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.checkpoint.format import replace_text
from lockstep.config import ConfigError, Recipe, apply_overrides, as_dict, check_text
from lockstep.experiment.lock import locked
from lockstep.experiment.progress import RunsProgress
from lockstep.experiment.record import (
    MAX_SEEDS,
    ExperimentRecord,
    format_record,
    is_experiment,
    read_experiment,
    run_directory,
)
from lockstep.experiment.record_file import MAX_NUMBER
from lockstep.experiment.scheduler import RunScheduler, Start, available_cores, start_lockstep
from lockstep.experiment.seed_queue import SeedQueue, SeedRun
from lockstep.inference import build_recipe
from lockstep.io.jsonl import EXPERIMENT
from lockstep.io.printable import printable
from lockstep.launch.device import device_type
from lockstep.run_reservation import reserve


@dataclass(frozen=True)
class TrainingOutcome:
    """How the training of an experiment ended."""

    failed: Sequence[SeedRun]
    """Runs that ended with an error. They can be resumed."""
    stopped: bool
    """Whether a signal ended training early. The runs have saved their state."""


def create_experiment(recipe: Recipe, seeds: int, procs: int, command: str, init_from: str | None = None) -> Path:
    """Create the directory of a new experiment, with seeds from `run.seed` on. Its name is that of `run.name`.

    Args:
        recipe: The validated recipe of all runs.
        seeds: Number of runs.
        procs: Processes of each run.
        command: Command that starts the experiment, for people.
        init_from: Run whose weights all runs start from.
    """
    first = recipe.run.seed
    if not 0 < seeds <= MAX_SEEDS:
        raise ConfigError(f"the number of seeds is {seeds}.", f"Use a number from 1 to {MAX_SEEDS:,}.")
    if not 0 <= first < MAX_NUMBER - seeds:
        raise ConfigError(f"run.seed is {first}.", "Use a first seed that is not negative and has at most 17 digits.")
    for name, value in (("the recipe", recipe.name), ("--init-from", init_from or "")):
        check_text(value, name)
    record = ExperimentRecord(
        recipe=recipe.name,
        command=printable(command, newlines=False),
        seeds=tuple(range(first, first + seeds)),
        procs=procs,
        init_from=init_from,
        settings=as_dict(recipe),
    )
    try:
        path = reserve(recipe).absolute()
        with locked(path, "experiment"):
            if is_experiment(path):  # another command has reserved the same name
                raise ConfigError(f"{path} already contains an experiment.", "Choose another --run.name.")
            replace_text(path / EXPERIMENT, format_record(record))
    except OSError as error:
        raise ConfigError(
            f"{recipe.run.runs_dir} cannot be written: {error}.", "Choose another directory with --run.runs-dir."
        ) from None
    return path


def seed_recipe(experiment: Path, record: ExperimentRecord, seed: int) -> Recipe:
    """Return the recipe of one seed of an experiment. Only the first records a video, which takes time of a core."""
    recipe = build_recipe(experiment / EXPERIMENT, record.recipe, record.settings)
    path = run_directory(experiment, seed).absolute()
    recipe = apply_overrides(recipe, {"run": {"seed": seed, "runs_dir": str(path.parent), "name": path.name}})
    return recipe if seed == record.seeds[0] else apply_overrides(recipe, {"run.record_video": False})


def train_experiment(
    experiment: Path,
    procs: int | None = None,
    parallel: int | None = None,
    progress: RunsProgress | None = None,
    start: Start = start_lockstep,
) -> TrainingOutcome:
    """Train the runs of an experiment that have not finished: start or resume them.

    Args:
        experiment: Directory of the experiment.
        procs: Processes of each run. None: the number that the experiment was created with.
        parallel: Runs at a time. None: as many as the GPUs of the machine allow, or its cores if it has no GPU.
        progress: Shows the progress. None: on standard error.
        start: Starts a subprocess.
    """
    record = read_experiment(experiment)
    procs = record.procs if procs is None else procs
    if procs < 1 or (parallel is not None and parallel < 1):
        raise ConfigError(f"--procs is {procs} and --parallel is {parallel}.", "Use at least 1 of each.")
    recipe = seed_recipe(experiment, record, record.seeds[0])  # raises for invalid settings before a process starts
    gpus, at_a_time = runs_at_a_time(recipe.run.device, procs)
    steps = record.total_samples
    runs = [SeedRun(seed, run_directory(experiment, seed).absolute(), steps, procs) for seed in record.seeds]
    places = parallel or at_a_time
    with locked(experiment, "experiment"):
        queue = SeedQueue(runs, places)
        scheduler = RunScheduler[SeedRun](
            queue,
            prepare=lambda run, slot: run.prepare(gpus_of_slot(gpus, slot, procs)),
            record=queue.record,
            parallel=places,
            progress=progress or RunsProgress(),
            start=start,
        )
        scheduler.run()
    return TrainingOutcome(scheduler.failed, scheduler.stopped)


def runs_at_a_time(device: str, procs: int) -> tuple[list[str], int]:
    """Return the visible GPUs, and how many runs of `procs` processes fit on them, or on the cores without GPUs."""
    kind = device_type(device)
    gpus = visible_gpus() if kind == "cuda" else []
    return gpus, max(1, (available_cores() if kind == "cpu" else len(gpus) or 1) // procs)


def visible_gpus() -> list[str]:
    """Return the ids of the visible GPUs, as in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(gpu) for gpu in range(count)] if visible is None else visible.split(",")[:count]


def gpus_of_slot(gpus: Sequence[str], slot: int, procs: int) -> list[str]:
    """Return the GPUs of the run in a slot. Slots share GPUs if there are more slots than GPUs."""
    numbers = range(slot * procs, (slot + 1) * procs)
    return list(dict.fromkeys(gpus[number % len(gpus)] for number in numbers)) if gpus else []
