"""`lockstep train RECIPE`: train on one process, on several here, or as one of those that torchrun started."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from lockstep.cli.options import LAUNCHER_FLAGS, Machines, choose_gpus, parse_recipe, parse_start, settle
from lockstep.cli.waking import wake
from lockstep.config import ConfigError, Recipe, overlay


def run(arguments: Sequence[str]) -> int:
    start, rest, notes = parse_start(
        arguments, "train", "Train a recipe on one process or many: the same agent, sooner."
    )
    if start.resume is not None:
        from lockstep.cli.resume import run as resume

        given = {field.name: getattr(start, field.name) for field in fields(Machines)}
        changed = {name: value for name, value in given.items() if value != getattr(Machines(), name)}
        flags = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
        return resume([start.resume, *flags, *rest])
    procs = choose_gpus(start.gpus, start.procs)
    wake()

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
    fleet = start.fleet(procs)
    # A job with a name goes on with the run it began: a scheduler that queues it again gives the very same command.
    alone = fleet.nodes[1] == 1 and fleet.job is None
    if started or (procs == 1 and alone):
        return run_worker(lambda: train(recipe, init_from=start.init_from))
    words = [*_without(arguments, *LAUNCHER_FLAGS)]
    words = [word for word in words if word not in ("--autoscale", "--max-utilization", "--max_utilization")]
    words += [f"{name}={value}" for name, value in settings.items()]
    if alone:
        path = path_of(recipe)  # settled here, so that a name already taken is refused before anything starts
        refuse_taken(path)
        words += [f"run.name={path.name}", f"run.lanes={recipe.run.lanes}"]
    return launch_or_explain(["train", *words], fleet)


def _autoscaled(recipe: Recipe, started: int, procs: int) -> dict[str, Any]:
    """What short probes of this machine chose, said with its reasons before anything starts."""
    if started > 1:
        raise ConfigError(
            "--autoscale probes one machine before its processes start, and torchrun has started them already.",
            "Let `lockstep train --autoscale --procs N` choose, and give torchrun the numbers it prints.",
        )
    from rich.console import Console

    from lockstep.runtime.place import Place, set_arithmetic
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
