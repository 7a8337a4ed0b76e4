"""`lockstep fork RUN[@SAMPLES]`: a new run from a whole checkpoint of another run, with changed settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.flag_aliases import normalize_args
from lockstep.cli.options import LocalLaunchOptions, StopOptions, resolve, resolve_procs
from lockstep.cli.parser import parse_args
from lockstep.cli.resume import CHANGEABLE, change_settings, full_names, split_settings
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.cli.worker_spec import write_spec
from lockstep.config import ConfigError, RecipeT, apply_overrides
from lockstep.experiment.record import is_experiment
from lockstep.io.printable import print_line
from lockstep.io.temporary_directory import temporary_directory
from lockstep.sweeps.record import is_sweep

if TYPE_CHECKING:
    from lockstep.forking import Fork

CHANGEABLE_IN_FORK = (
    *CHANGEABLE,
    *("reduction", "log_tensor_digests"),
    *("wandb", "wandb_project", "wandb_entity", "wandb_mode", "wandb_timeout"),
)
"""Settings of `run` that may be changed when a run is forked."""


@dataclass(frozen=True, kw_only=True)
class ForkOptions(LocalLaunchOptions, StopOptions):
    """Start a new run from a whole checkpoint of another run: networks, optimizers, environments, replay and clock.

    Settings that `lockstep resume` can change may follow, such as --algo.learning-rate 1e-4 or algo.gamma=0.9, and
    --run.name and --run.runs-dir of the new run. Without changes it equals its parent at every later checkpoint. The
    parent is not changed, and may be training. Replay is shared by hard links.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[@SAMPLES]")]
    """Run directory, and the samples of its checkpoint. Without samples: the newest undamaged checkpoint. Of a sweep,
    the best trial is forked."""
    create_only: bool = False
    """Create the run without training it. `lockstep resume` trains it, also on several hosts or under torchrun."""


def run(arguments: Sequence[str]) -> int:
    parsed = normalize_args(arguments, {"total-samples": "run.total-samples"})
    flags, settings = split_settings(parsed.flags)
    command = parse_args(ForkOptions, flags, "lockstep fork")
    procs = resolve_procs(command)
    settings |= parsed.settings
    for name, value in parsed.unit_flags.items():
        if name != "epochs":
            raise ConfigError(f"--{name} is not known to fork.", "Give the setting itself, such as algo.batch_size.")
        settings["algo.epochs"] = value
    import_torch_with_status("lockstep.training_loop")

    from lockstep.bucket_copy import location_of
    from lockstep.cli.workers import launch_and_report, print_notes, run_training_worker, started_processes
    from lockstep.forking import create_fork
    from lockstep.inference import load_recipe
    from lockstep.initial_weights import split_source
    from lockstep.launch.device import require_gpus
    from lockstep.launch.rendezvous import LaunchConfig
    from lockstep.sweeps.progress import best_run
    from lockstep.training_loop import train

    if started_processes():
        raise ConfigError(
            "a fork is created by one process, but torchrun has started this one.",
            "Run `lockstep fork ... --create-only` once, then `lockstep resume` with torchrun.",
        )
    parent, at = split_source(command.run)
    parent = best_run(parent) if is_sweep(parent) else parent
    before = apply_overrides(load_recipe(parent), location_of(parent))
    recipe = resolve(fork_settings(before, settings, parent if at is None else f"{parent}@{at}"), procs)
    print_notes(parsed.notes)
    if command.create_only and recipe.run.allow_other_machine:
        raise ConfigError(
            "run.allow_other_machine applies to one start, and --create-only starts nothing.",
            "Give it to `lockstep resume` instead.",
        )
    if not command.create_only:
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    fork = create_fork(parent, at, before, recipe)
    print_notes(fork.notes)
    for line in describe(fork, command.create_only):
        print_line(line)
    if command.create_only:
        return 0
    recipe = apply_overrides(recipe, {"run.name": fork.name})
    if procs == 1:
        return run_training_worker(lambda: train(recipe, resume=True, stop_at=command.stop_at), command.stop_at)
    with temporary_directory("fork") as directory:
        spec = write_spec(directory / "spec.json", recipe, resume=True, stop_at=command.stop_at)
        return launch_and_report(spec, LaunchConfig(procs, command.max_restarts))


def fork_settings(before: RecipeT, settings: Mapping[str, Any], source: Path | str) -> RecipeT:
    """Return the recipe of a fork: that of its parent with changed settings, and a name of its own.

    Raises:
        ConfigError: A setting is unknown, or cannot be changed.
    """
    settings = full_names(settings)
    location: dict[str, Any] = {"run.name": settings.pop("run.name", "")}
    beside = before.run.runs_dir
    if is_experiment(Path(beside)) or is_sweep(Path(beside)):  # it contains its own runs only
        beside = str(Path(beside).parent)
    location["run.runs_dir"] = settings.pop("run.runs_dir", beside)
    changed = change_settings(before, settings, source, CHANGEABLE_IN_FORK, "forked")
    return apply_overrides(changed, location)


def describe(fork: "Fork", created_only: bool) -> list[str]:
    """Return lines about a new fork: parent, changed settings, and the next command."""
    from lockstep.fork_record import describe_changes

    record = fork.record
    changes = [f"  {change}" for change in describe_changes(record.changes)] or ["  no changed settings"]
    resume = [f"  train    lockstep resume {fork.location}"] if created_only else []
    return [f"Forked {record.parent} at {record.samples:,} samples: {fork.location}", *changes, *resume]
