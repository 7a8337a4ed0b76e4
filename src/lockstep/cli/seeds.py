"""Several seeds of one training: `lockstep train RECIPE --seeds N`, and `lockstep resume EXPERIMENT`."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.options import (
    LaunchOptions,
    ScheduledRunOptions,
    TrainOptions,
    parse_recipe,
    resolve,
    resolve_procs,
)
from lockstep.cli.parser import parse_args
from lockstep.config import ConfigError
from lockstep.experiment.record import SEED_RUN, read_experiment
from lockstep.io.printable import print_line

if TYPE_CHECKING:
    from lockstep.cli.resume import Resume


def train_seeds(options: TrainOptions, rest: list[str], notes: list[str], arguments: Sequence[str]) -> int:
    """Create an experiment and train its runs. `arguments` are those of `lockstep train`."""
    if options.seeds is None:
        raise ConfigError("--parallel needs several runs.", "Add --seeds N.")
    if options.autoscale:
        raise ConfigError(
            "--autoscale probes the machine for one run, not for several at a time.",
            "Run `lockstep train --autoscale` once, and pass the settings that it prints together with --seeds.",
        )
    if options.stop_at is not None:
        raise ConfigError("--stop-at stops one run, not several seeds.", "Set run.total_samples, or omit --seeds.")
    refuse_hosts(options, "--seeds")

    from lockstep.cli.find_run import resolve_init_from
    from lockstep.cli.workers import print_notes
    from lockstep.experiment.seed_runs import create_experiment
    from lockstep.launch.device import require_gpus

    procs = processes_per_run(options)
    recipe = parse_recipe(options, rest, f"lockstep train {options.recipe}", options.config)
    init_from, note = resolve_init_from(recipe, options.init_from) if options.init_from else (None, "")
    print_notes([*notes, note] if note else notes)
    resolved = resolve(recipe, procs)
    require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    command = shlex.join(["lockstep", "train", *arguments])
    source = init_from and os.path.abspath(init_from)  # a resume may have another current directory
    experiment = create_experiment(resolved, options.seeds, procs, command, source)
    return train_and_summarize(experiment, procs, options.parallel)


def resume_experiment(options: "Resume", settings: Sequence[str]) -> int:
    """Train the unfinished runs of an experiment. `settings` are those of the command line, which cannot change it."""
    from lockstep.cli.resume import refuse_options_of_one_run

    refuse_options_of_one_run(options, settings, "an experiment of several seeds")
    refuse_hosts(options, "An experiment")

    from lockstep.cli.torch_import import import_torch_with_status

    import_torch_with_status("lockstep.training_loop")
    procs = processes_per_run(options)
    return train_and_summarize(options.run, None if options.procs is None else procs, options.parallel)


def train_and_summarize(path: Path, procs: int | None, parallel: int | None) -> int:
    """Train the unfinished runs of an experiment and print its score. Return the exit code."""
    from lockstep.experiment.experiment import Experiment
    from lockstep.experiment.seed_runs import train_experiment
    from lockstep.experiment.statistics import PERCENT
    from lockstep.launch.world import EXIT_PREEMPTED, warn_user
    from lockstep.tools.report.series import format_estimate

    outcome = train_experiment(path, procs, parallel)
    if outcome.failed:
        failed = ", ".join(f"{run.label} ({run.log})" for run in outcome.failed)
        warn_user(f"{len(outcome.failed)} runs failed: {failed}. Run them again: lockstep resume {path}")
    experiment = Experiment(path)
    summary = experiment.estimate
    if outcome.stopped:
        print_line(f"Stopped: {path}\n  resume   lockstep resume {path}")
        return EXIT_PREEMPTED
    score = "" if summary is None else f", IQM [{PERCENT} interval] {format_estimate(summary)}"
    print_line(f"Done: {len(experiment.scores)} of {len(experiment.seeds)} seeds{score}: {path}")
    print_line(f"  report   lockstep report {path}\n  runs     lockstep ls {path}")
    return 1 if outcome.failed else 0


def run_seed(arguments: Sequence[str]) -> int:
    """Start the run of one seed: the process that trains it starts here."""
    from lockstep.cli.train import train_resolved
    from lockstep.experiment.seed_runs import seed_recipe
    from lockstep.launch.rendezvous import LaunchConfig

    experiment, seed = Path(arguments[0]), int(arguments[1])
    options = parse_args(ScheduledRunOptions, arguments[2:], f"lockstep train {SEED_RUN}")
    procs = processes_per_run(options)
    record = read_experiment(experiment)
    recipe = resolve(seed_recipe(experiment, record, seed), procs)
    return train_resolved(recipe, LaunchConfig(procs), init_from=record.init_from, stop_at=options.stop_at)


def processes_per_run(options: LaunchOptions) -> int:
    """Return the processes of each run, and make GPUs visible. Several GPUs do not imply several processes here."""
    procs = resolve_procs(options)
    return 1 if options.procs is None else procs


def refuse_hosts(options: LaunchOptions, name: str) -> None:
    """Raise ConfigError if a launcher started this process, or for options of several hosts."""
    from lockstep.launch.process_lifetime import started_by_a_launcher

    if started_by_a_launcher():
        raise ConfigError(f"{name} starts its own processes, but a launcher started this one.", "Use no launcher.")
    if options.rdzv_id is not None or options.rdzv_endpoint is not None or options.nnodes != "1":
        raise ConfigError(f"{name} trains on one machine.", "Train the seeds one by one for runs on several hosts.")
