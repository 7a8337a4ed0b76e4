"""`lockstep train RECIPE`: train on one process, start several, or run as a worker of torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.flag_aliases import RESUME_NEWEST
from lockstep.cli.options import (
    LaunchOptions,
    TrainOptions,
    parse_recipe,
    parse_train,
    resolve,
    resolve_procs,
)
from lockstep.cli.worker_spec import WORKER, run_spec, write_spec
from lockstep.config import ConfigError, Recipe, apply_overrides, as_dict, flat_settings
from lockstep.experiment.record import SEED_RUN
from lockstep.io.printable import print_line
from lockstep.io.temporary_directory import temporary_directory
from lockstep.launch.process_lifetime import ENV_PARENT_PID
from lockstep.sweeps.record import TRIAL_RUN

if TYPE_CHECKING:
    from lockstep.launch.rendezvous import LaunchConfig

PROBE = "--probe"
"""Internal first argument of the process that probes this machine for --autoscale."""
LOCATION = ("run.runs_dir", "run.name")
"""Settings that say where a run is."""


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == [WORKER]:
        return run_spec(Path(arguments[1]))
    if arguments[:1] == [PROBE]:
        return _probe(Path(arguments[1]), int(arguments[2]), arguments[3:])
    if arguments[:1] == [SEED_RUN]:
        from lockstep.cli.seeds import run_seed

        return run_seed(arguments[1:])
    if arguments[:1] == [TRIAL_RUN]:
        from lockstep.cli.sweep import run_trial

        return run_trial(arguments[1:])
    options, rest, notes = parse_train(arguments)
    if options.resume is not None:
        return _resume(options, rest)
    if options.seeds is not None or options.parallel is not None:
        from lockstep.cli.seeds import train_seeds

        return train_seeds(options, rest, notes, arguments)

    from lockstep.cli.find_run import resolve_init_from
    from lockstep.cli.workers import launch_and_report, print_notes, run_training_worker, started_processes
    from lockstep.launch.device import require_gpus
    from lockstep.training_loop import train

    started = started_processes()
    procs = started if started and options.procs == "auto" else resolve_procs(options)
    if started and procs not in (1, started):
        raise ConfigError(f"--procs is {procs}, but torchrun started {started} processes.", "Remove --procs.")
    recipe = parse_recipe(options, rest, f"lockstep train {options.recipe}", options.config)
    resolved = resolve(recipe, started or procs)
    init_from, note = resolve_init_from(recipe, options.init_from) if options.init_from else (None, "")
    print_notes([*notes, note] if note else notes)
    if not started:
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    if options.autoscale:
        recipe = apply_overrides(recipe, _autoscaled(arguments, started, procs))
        resolved = resolve(recipe, started or procs)
    start: Any = {"init_from": init_from, "stop_at": options.stop_at}
    launch_config = options.launch_config(procs)
    # A job with an ID resumes the run that it started: a scheduler requeues it with an identical command.
    standalone = launch_config.nodes[1] == 1 and launch_config.job is None
    if started:
        return run_training_worker(lambda: train(resolved, **start), options.stop_at)
    if standalone:
        return train_resolved(resolved, launch_config, **start)
    with temporary_directory("train") as directory:
        # Lanes depend on the number of processes, known only after the rendezvous: workers resolve the recipe.
        return launch_and_report(write_spec(directory / "spec.json", recipe, **start), launch_config)


def train_resolved(recipe: Recipe, config: "LaunchConfig", **start: Any) -> int:
    """Train a validated recipe on this machine: in this process, or in several that are started."""
    from lockstep.cli.workers import launch_and_report, run_training_worker
    from lockstep.run_reservation import reserved
    from lockstep.training_loop import train

    if config.processes == 1:
        return run_training_worker(lambda: train(recipe, **start), start.get("stop_at"))
    # The directory is reserved before workers start, so that a name in use fails early.
    with temporary_directory("train") as directory, reserved(recipe) as (_, named_recipe, job):
        worker_args = write_spec(directory / "spec.json", named_recipe, **start)
        return launch_and_report(worker_args, replace(config, job=job))


def _resume(options: TrainOptions, rest: list[str]) -> int:
    """Resume a run, as `lockstep resume RUN` does. A bare `--resume` means the newest run of the recipe."""
    from lockstep.cli.resume import run as resume

    launch_options = {field.name: getattr(options, field.name) for field in fields(LaunchOptions)}
    changed = {name: value for name, value in launch_options.items() if value != getattr(LaunchOptions(), name)}
    flags = [arg for name, value in changed.items() for arg in (f"--{name}", str(value))]
    if options.resume != RESUME_NEWEST or Path(RESUME_NEWEST).exists():
        return resume([str(options.resume), *flags, *rest])

    from lockstep.cli.find_run import newest_run
    from lockstep.cli.workers import print_notes

    recipe = parse_recipe(options, rest, f"lockstep train {options.recipe}", options.config)
    path = newest_run(recipe)
    print_notes([f"--resume means the newest run of {recipe.name}: {path}."])
    # Settings of the command line that are those of the run change nothing.
    default, given = (flat_settings(as_dict(config)) for config in (type(recipe)(), recipe))
    changed = {key: value for key, value in given.items() if value != default.get(key) and key not in LOCATION}
    texts = {key: ",".join(map(str, value)) if isinstance(value, tuple) else value for key, value in changed.items()}
    settings = [f"{key}={text}" for key, text in texts.items()]
    return resume([str(path), *flags, *settings])


def _autoscaled(arguments: Sequence[str], started: int, procs: int) -> dict[str, Any]:
    """Choose settings by short probes of this machine and print them with the reasons.

    The probes run in a separate process: a launcher that used a GPU would hold GPU memory for the whole run.
    """
    if started > 1:
        raise ConfigError(
            "--autoscale must probe the machine before processes start, but torchrun has already started them.",
            "Run `lockstep train --autoscale --procs N` once and pass the settings it prints to torchrun.",
        )
    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole()
    with temporary_directory("probe") as directory:
        out = directory / "choice.json"
        with console.status("probing this machine") as status:
            code = run_probe([PROBE, str(out), str(procs), *arguments], status.update)
        if code or not out.exists():
            raise ConfigError("the probes of --autoscale failed. See the error above.", "Train without --autoscale.")
        choice = json.loads(out.read_text())
    console.print("Scaled to this machine:")
    for reason in choice["reasons"]:
        console.print(f"  {reason}")
    settings: dict[str, Any] = choice["settings"]
    args = " ".join(f"{name}={value}" for name, value in settings.items())
    console.print(f"  to use these settings without probing: {args}", soft_wrap=True)
    return settings


def run_probe(args: Sequence[str], progress: Callable[[str], None]) -> int:
    """Run `lockstep train ARGS` in a separate process, call `progress` for every output line, return the exit code."""
    command = [sys.executable, "-P", "-m", "lockstep", "train", *args]
    environment = os.environ | {ENV_PARENT_PID: str(os.getpid())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            progress(line.strip())
    return process.returncode


def _probe(out: Path, procs: int, arguments: Sequence[str]) -> int:
    """Probe this machine, print progress line by line and write the chosen settings to a file."""
    from lockstep.launch.device import configure_torch
    from lockstep.launch.world import WorldInfo
    from lockstep.tools.bench.autoscale import autoscale

    options, rest, _ = parse_train(arguments)
    recipe = resolve(parse_recipe(options, rest, f"lockstep train {options.recipe}", options.config), procs)
    configure_torch(recipe.run, WorldInfo(local_size=procs))
    choice = autoscale(recipe, procs, print_line)
    out.write_text(json.dumps({"settings": choice.settings, "reasons": choice.reasons}))
    return 0
