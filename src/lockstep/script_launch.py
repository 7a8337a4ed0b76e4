"""Train from a Python script: in its process, or in processes that are started for it."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, Recipe
from lockstep.io.temporary_directory import temporary_directory
from lockstep.launch.process_lifetime import launch_directory
from lockstep.launch.world import WorldInfo
from lockstep.run_results import Callback, Run, RunEvents


def train_run(
    recipe: Recipe,
    path: Path,
    procs: int,
    callbacks: tuple[Callback | None, ...],
    job: str | None = None,
    **options: Any,
) -> Run:
    """Train in this process, or start processes and report their log to the callbacks."""
    make_importable(recipe, required=procs > 1)
    poll = RunEvents(path, *callbacks).poll if any(callbacks) else None
    if procs == 1:
        from lockstep.training_loop import train as train_in_process

        train_in_process(recipe, **options, on_record=poll)
    else:
        _launch(recipe, procs, job, poll, options)
    if poll is not None:
        poll()
    return Run(path, recipe)


def refuse_launched_process() -> None:
    """Raise ConfigError in a process that a launcher started: it would start a second run."""
    if launch_directory() is not None:
        raise ConfigError(
            "lockstep.train, lockstep.resume or lockstep.fork was called while a worker process imported your file.",
            'Put the call under `if __name__ == "__main__":`.',
        )
    if WorldInfo.from_environment().launched:
        raise ConfigError(
            "lockstep.train, lockstep.resume and lockstep.fork start processes, but this one was started by torchrun "
            "(RANK is set).",
            "Start your script with python and pass procs=N, or use torchrun with `-m lockstep train RECIPE`.",
        )


def _launch(
    recipe: Recipe, procs: int, job: str | None, poll: Callable[[], None] | None, options: Mapping[str, Any]
) -> None:
    from lockstep.cli.worker_spec import write_spec
    from lockstep.launch.device import require_gpus
    from lockstep.launch.launcher import INTERRUPTED, launch
    from lockstep.launch.rendezvous import LaunchConfig

    require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    with temporary_directory("train") as directory:
        worker_args = write_spec(directory / "spec.json", recipe, **options)
        outcome = launch(worker_args, LaunchConfig(procs, job=job), poll=poll)
    if outcome.code == INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.cause:
        raise RuntimeError(outcome.cause)


def make_importable(recipe: Recipe, required: bool) -> None:
    """Name the file that defines a recipe's class, from which workers and later commands import it."""
    if recipe.name:
        return
    file = getattr(sys.modules[type(recipe).__module__], "__file__", None)
    if file is not None:
        type(recipe).name = str(Path(file).resolve())
    elif required:
        raise ConfigError(
            f"worker processes cannot import {type(recipe).__name__}, which is defined in a notebook or shell.",
            "Write it to a Python file and pass the path, or train one run with procs=1.",
        )
