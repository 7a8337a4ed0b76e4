"""`lockstep sweep RECIPE --space FILE --trials N`: search for good settings, and `lockstep sweep DIR` to resume."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.cli.options import (
    LaunchOptions,
    LocalLaunchOptions,
    PresetOptions,
    RecipeOptions,
    ScheduledRunOptions,
    parse_command,
    parse_recipe,
    resolve,
)
from lockstep.cli.parser import parse_args
from lockstep.cli.seeds import processes_per_run, refuse_hosts
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.config import ConfigError
from lockstep.io.printable import print_line
from lockstep.sweeps.record import TRIAL_RUN, is_sweep, read_sweep

if TYPE_CHECKING:
    from lockstep.sweeps.sweep import Sweep

SHOWN_TRIALS = 20
"""Trials in the printed table."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(LocalLaunchOptions, PresetOptions):
    """Search for good settings of a recipe: train trials with different settings, and stop bad ones early.

    Every trial is a run in the directory of the sweep. The results depend neither on --parallel nor on interruptions.
    Settings of the recipe may follow, as with `train`; all trials have them. To resume a sweep, give its directory.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE|DIR")]
    """Recipe name, a Python file that defines a recipe, or the directory of a sweep to resume."""
    space: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """YAML file with the range or the choices of each setting. Required for a new sweep."""
    trials: int | None = None
    """Number of trials. With the directory of a sweep: a new, larger number. None: 20."""
    metric: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Metric in the log, such as eval/return_mean, of which the newest value counts. None: score or mean return of the
    last evaluation; without evaluations, the mean return of the last 100 training episodes."""
    minimize: bool = False
    """Lower values of --metric are better."""
    prune: Literal["asha", "median", "pbt", "none"] = "asha"
    """Trials that stop early. asha: all but the best 1/eta at each rung. median: those below the median. pbt: none, but
    at each rung the worst quarter continues from copies of the best, with changed settings. none: none."""
    min_samples: Annotated[int | None, tyro.conf.arg(metavar="SAMPLES")] = None
    """Global samples before the first decision. None: run.total_samples / eta^2 for asha, a quarter of it for
    median and a tenth for pbt, which then decide again after each."""
    eta: int = 3
    """asha: one trial in this number continues after a rung, and each rung has this number of times more samples."""
    sampler: Literal["tpe", "random"] = "tpe"
    """Settings of the trials. tpe: Optuna's tree-structured Parzen estimator, after 10 random trials."""
    sweep_seed: int = 0
    """Seed of the sampler. run.seed, the seed of the runs, is the same for all trials."""
    window: int = 8
    """Trial k is suggested from the results of trials 0 to k - window. More trials can then train at a time, with
    older results."""
    parallel: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Trials at a time. None: the number of GPUs, or of CPU cores without GPUs, divided by --procs."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """YAML file with settings of all trials. Flags take precedence."""
    storage: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Database for a copy of the study, such as sqlite:///study.db. None: only study.journal in the directory."""
    wandb_sweep: bool = False
    """Train nothing; print a file for `wandb sweep`, whose runs are started by `lockstep train`."""
    skip_failed: bool = False
    """Record a trial as failed that ends with an error in three attempts. Otherwise the sweep waits for a fix."""


OF_EVERY_START = (
    "recipe",
    "trials",
    "parallel",
    "storage",
    "skip_failed",
    *(f.name for f in fields(LocalLaunchOptions)),
)
"""Options that may also be given to resume a sweep."""


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(SweepOptions, arguments, "sweep")
    if is_sweep(Path(command.recipe)):
        return _resume(command, rest)
    if command.space is None:
        raise ConfigError("a new sweep needs a search space.", "Add --space FILE, such as --space space.yaml.")

    from lockstep.cli.workers import started_processes
    from lockstep.launch.device import require_gpus
    from lockstep.registry import RECIPES, recipe_module
    from lockstep.sweeps.optuna_study import require_optuna

    if started_processes():
        raise ConfigError("a sweep starts its own processes, but a launcher started this one.", "Use no launcher.")
    require_optuna()
    import_torch_with_status(
        "lockstep.training_loop", *([recipe_module(command.recipe)] if command.recipe in RECIPES else [])
    )

    from lockstep.sweeps.sweep_runs import create_sweep, plan_sweep

    procs = processes_per_run(_launch_options(command))
    options = RecipeOptions(recipe=command.recipe, preset=command.preset, smoke=command.smoke)
    recipe = resolve(parse_recipe(options, rest, f"lockstep sweep {command.recipe}", command.config), procs)
    require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    record = plan_sweep(
        recipe,
        command.space,
        trials=20 if command.trials is None else command.trials,
        metric=command.metric,
        direction="minimize" if command.minimize else "maximize",
        prune=command.prune,
        min_samples=command.min_samples,
        eta=command.eta,
        sampler=command.sampler,
        seed=command.sweep_seed,
        window=command.window,
        procs=procs,
        command=shlex.join(["lockstep", "sweep", *arguments]),
    )
    if command.wandb_sweep:
        from lockstep.sweeps.space import read_space
        from lockstep.sweeps.wandb_sweep import wandb_sweep

        common = [command.recipe, *options.flags(), *(["--procs", str(procs)] if procs > 1 else [])]
        common += ["--config", str(command.config.absolute())] if command.config else []
        print_line(wandb_sweep(record, read_space(command.space, recipe), [*common, *rest]).rstrip())
        return 0
    sweep = create_sweep(recipe, record)
    return train_and_summarize(sweep, procs, command.parallel, command.storage, command.skip_failed)


def resume_sweep(options: LaunchOptions, sweep: Path, parallel: int | None) -> int:
    """Train the undecided trials of a sweep: `lockstep resume SWEEP`."""
    refuse_hosts(options, "A sweep")
    import_torch_with_status("lockstep.training_loop")
    procs = processes_per_run(options)
    return train_and_summarize(sweep, None if options.procs is None else procs, parallel)


def _resume(command: SweepOptions, rest: Sequence[str]) -> int:
    """Resume a sweep, perhaps with more trials. What it searches cannot be changed."""
    sweep, default = Path(command.recipe), SweepOptions(recipe="")
    names = [field.name for field in fields(command) if field.name not in OF_EVERY_START]
    changed = [f"--{name.replace('_', '-')}" for name in names if getattr(command, name) != getattr(default, name)]
    if given := [*changed, *rest]:
        raise ConfigError(
            f"{given[0]} cannot be changed when the sweep {sweep} is resumed.", "Remove it, or start a new sweep."
        )
    import_torch_with_status("lockstep.training_loop")

    from lockstep.sweeps.sweep_runs import add_trials

    procs = processes_per_run(_launch_options(command))
    if command.trials is not None:
        add_trials(sweep, command.trials)
    return train_and_summarize(
        sweep, None if command.procs is None else procs, command.parallel, command.storage, command.skip_failed
    )


def _launch_options(command: SweepOptions) -> LaunchOptions:
    return LaunchOptions(**{field.name: getattr(command, field.name) for field in fields(LocalLaunchOptions)})


def train_and_summarize(
    path: Path, procs: int | None, parallel: int | None, storage: str | None = None, skip_failed: bool = False
) -> int:
    """Train the undecided trials of a sweep and print its table. Return the exit code."""
    from lockstep.launch.world import EXIT_PREEMPTED, warn_user
    from lockstep.sweeps.sweep import Sweep
    from lockstep.sweeps.sweep_runs import train_sweep

    outcome = train_sweep(path, procs, parallel, storage, skip_failed)
    sweep = Sweep(path)
    if outcome.failed:
        failed = ", ".join(f"{run.label} ({run.log})" for run in outcome.failed)
        warn_user(
            f"{len(outcome.failed)} trials ended with an error: {failed}. Fix the cause and resume the sweep, with "
            f"--skip-failed to record them as failed: lockstep sweep {path}"
        )
    print_table(sweep)
    if outcome.stopped:
        print_line(f"Stopped: {path}\n  resume   lockstep sweep {path}")
        return EXIT_PREEMPTED
    for line in describe_best(sweep):
        print_line(line)
    return 1 if outcome.failed else 0


def print_table(sweep: "Sweep") -> None:
    """Print the best trials with their settings."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lockstep.io.rich_console import PrintableConsole

    ranking = sweep.ranking
    if not ranking:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("trial", "state", "samples", "value"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    names = list(ranking[0].settings)
    short = [name.rpartition(".")[2] for name in names]
    for name, last in zip(names, short, strict=True):
        table.add_column(name if short.count(last) > 1 else last, justify="right", overflow="fold")
    for trial in ranking[:SHOWN_TRIALS]:
        value = "-" if trial.value is None else f"{trial.value:,.4g}"
        settings = [format_setting(trial.settings.get(name)) for name in names]
        table.add_row(str(trial.number), trial.state, f"{trial.samples:,}", value, *settings)
    console = PrintableConsole()
    console.print(table)
    if len(ranking) > SHOWN_TRIALS:
        console.print(f"{len(ranking) - SHOWN_TRIALS} more trials are in {sweep.path}.")


def describe_best(sweep: "Sweep") -> list[str]:
    """Return lines about the best trial, and the commands that continue from it."""
    from lockstep.sweeps.sweep_runs import write_best

    best, record = sweep.best, read_sweep(sweep.path)
    if best is None or best.value is None:
        return [f"Done: no trial has finished: {sweep.path}"]
    settings, trial = write_best(sweep.path, best.number), best.run.path
    return [
        f"Done: trial {best.number} is the best of {len(sweep.trials)}, {record.metric or 'score'} {best.value:,.4g}: "
        f"{trial}",
        f"  seeds    lockstep train {shlex.quote(record.recipe)} --seeds 5 --config {settings}",
        f"  longer   lockstep fork {trial} run.total_samples={2 * record.total_samples}",
        f"  report   lockstep report {sweep.path}",
    ]


def format_setting(value: object) -> str:
    """Return a searched setting as short text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_trial(arguments: Sequence[str]) -> int:
    """Start one trial of a sweep: the process that trains it starts here."""
    from lockstep.cli.train import train_resolved
    from lockstep.launch.rendezvous import LaunchConfig
    from lockstep.sweeps.record import read_trials
    from lockstep.sweeps.trial_runs import trial_recipe

    directory, number = Path(arguments[0]), int(arguments[1])
    options = parse_args(ScheduledRunOptions, arguments[2:], f"lockstep train {TRIAL_RUN}")
    procs = processes_per_run(options)
    recipe = trial_recipe(directory, read_sweep(directory), read_trials(directory)[number], number)
    return train_resolved(resolve(recipe, procs), LaunchConfig(procs), stop_at=options.stop_at)
