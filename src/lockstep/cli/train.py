"""`lockstep train RECIPE`: train on one process, on several here, or as one of those that torchrun started."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.cli.options import choose_gpus, parse_recipe, parse_start, settle
from lockstep.config import ConfigError, Recipe, overlay


def run(arguments: Sequence[str]) -> int:
    start, rest, notes = parse_start(
        arguments, "train", "Train a recipe on one process or many: the same agent, sooner."
    )
    if start.resume is not None:
        from lockstep.cli.resume import run as resume

        gpus = [] if start.gpus is None else ["--gpus", start.gpus]
        return resume([start.resume, "--procs", str(start.procs), *gpus, *rest])
    procs = choose_gpus(start.gpus, start.procs)

    from lockstep.cli.launching import launch_or_explain, run_worker, say_notes, started_processes
    from lockstep.run.rundir import path_of, refuse_taken
    from lockstep.train import train

    started = started_processes()
    if started and procs not in (1, started):
        raise ConfigError(f"--procs {procs} was given to one of {started} processes of torchrun.", "Leave --procs out.")
    recipe = parse_recipe(replace(start, procs=started or procs), rest, f"lockstep train {start.recipe}")
    say_notes(notes)
    settings = _autoscaled(recipe, started, procs) if start.autoscale else {}
    recipe = settle(overlay(recipe, settings), started or procs)
    if started or procs == 1:
        return run_worker(lambda: train(recipe, init_from=start.init_from))
    path = path_of(recipe)  # settled here, so that all processes mean the same directory
    refuse_taken(path)
    words = [*_without(arguments, "procs", "num-gpus", "world-size", "gpus"), f"run.name={path.name}"]
    words = [word for word in words if word not in ("--autoscale", "--max-utilization", "--max_utilization")]
    words += [f"{name}={value}" for name, value in settings.items()]
    return launch_or_explain(["train", *words, f"run.lanes={recipe.run.lanes}"], procs)


def _autoscaled(recipe: Recipe, started: int, procs: int) -> dict[str, Any]:
    """What short probes of this machine chose, said with its reasons before anything starts."""
    if started > 1:
        raise ConfigError(
            "--autoscale probes one machine before its processes start, and torchrun has started them already.",
            "Let `lockstep train --autoscale --procs N` choose, and give torchrun the numbers it prints.",
        )
    from rich.console import Console

    from lockstep.runtime.launch import Place, set_arithmetic
    from lockstep.speed.autoscale import autoscale

    set_arithmetic(recipe.run, Place(local_size=procs))
    console = Console(highlight=False)
    with console.status("probing this machine") as status:
        choice = autoscale(recipe, procs, status.update)
    console.print("Scaled to this machine:")
    for reason in choice.reasons:
        console.print(f"  {reason}", markup=False)
    words = " ".join(f"{name}={value}" for name, value in choice.settings.items())
    console.print(f"  the same again, without probing: {words}", markup=False, soft_wrap=True)
    return choice.settings


def _without(arguments: Sequence[str], *names: str) -> list[str]:
    """The arguments less some flags and their values, which are for the launcher alone."""
    kept, skip = [], False
    for word in arguments:
        name, has_value, _ = word.lstrip("-").replace("_", "-").partition("=")
        if skip:
            skip = False
        elif name in names or word == "-n":
            skip = not has_value
        else:
            kept.append(word)
    return kept
