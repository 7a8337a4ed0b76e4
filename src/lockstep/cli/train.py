"""`lockstep train RECIPE`: train on one process, on several here, or as one of those that torchrun started."""

from collections.abc import Sequence
from dataclasses import replace

from lockstep.cli.options import choose_gpus, parse_recipe, parse_start
from lockstep.config import ConfigError


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
    if started or procs == 1:
        return run_worker(lambda: train(recipe, init_from=start.init_from))
    path = path_of(recipe)  # settled here, so that all processes mean the same directory
    refuse_taken(path)
    words = [*_without(arguments, "procs", "num-gpus", "world-size", "gpus"), f"run.name={path.name}"]
    return launch_or_explain(["train", *words, f"run.lanes={recipe.run.lanes}"], procs)


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
