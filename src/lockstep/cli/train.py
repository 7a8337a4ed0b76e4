"""`lockstep train RECIPE`: train on one process, on several here, or as one of those that torchrun started."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lockstep.cli.flag_aliases import is_switch
from lockstep.cli.options import LAUNCHER_FLAGS, LaunchOptions, parse_recipe, parse_start, resolve, resolve_procs
from lockstep.cli.torch_import import import_torch_with_status
from lockstep.cli.worker_spec import WORKER, run_spec, write_spec
from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.io.printable import write_text
from lockstep.io.temporary_directory import temporary_directory
from lockstep.launch.process_lifetime import ENV_PARENT_PID

PROBE = "--probe"
"""First argument of the process that probes this machine for --autoscale; it is no flag for users."""


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == [WORKER]:
        return run_spec(Path(arguments[1]))
    if arguments[:1] == [PROBE]:
        return _probe(Path(arguments[1]), int(arguments[2]), arguments[3:])
    start, rest, notes = parse_start(
        arguments, "train", "Train a recipe on one process or many: the same agent, sooner."
    )
    if start.resume is not None:
        from lockstep.cli.resume import run as resume

        given = {field.name: getattr(start, field.name) for field in fields(LaunchOptions)}
        changed = {name: value for name, value in given.items() if value != getattr(LaunchOptions(), name)}
        flags = [word for name, value in changed.items() for word in (f"--{name}", str(value))]
        return resume([start.resume, *flags, *rest])
    import_torch_with_status()

    from lockstep.cli.workers import launch_and_report, run_training_worker, say_notes, started_processes
    from lockstep.launch.device import require_gpus
    from lockstep.run_dir import reserve
    from lockstep.train import train

    started = started_processes()
    procs = started if started and start.procs == "auto" else resolve_procs(start)
    if started and procs not in (1, started):
        raise ConfigError(f"--procs {procs} was given to one of {started} processes of torchrun.", "Leave --procs out.")
    recipe = parse_recipe(replace(start, procs=started or procs), rest, f"lockstep train {start.recipe}")
    say_notes(notes)
    if not started:
        require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    settings = _autoscaled(arguments, started, procs) if start.autoscale else {}
    recipe = resolve(apply_overrides(recipe, settings), started or procs)
    fleet = start.fleet(procs)
    # A job with a name goes on with the run it began: a scheduler that queues it again gives the very same command.
    alone = fleet.nodes[1] == 1 and fleet.job is None
    if started or (procs == 1 and alone):
        return run_training_worker(lambda: train(recipe, init_from=start.init_from))
    if not alone:
        # The number of processes, on which lanes depend, is known when the hosts have met: workers resolve the recipe.
        words = [*_without(arguments, *LAUNCHER_FLAGS)]
        words = [word for word in words if word not in ("--autoscale", "--max-utilization", "--max_utilization")]
        words += [f"{name}={value}" for name, value in settings.items()]
        return launch_and_report(["train", *words], fleet)
    path = reserve(recipe)  # here, so that a name already taken is refused before anything starts
    recipe = apply_overrides(recipe, {"run.name": path.name})
    try:
        with temporary_directory("train") as directory:
            words = write_spec(directory / "spec.json", recipe, init_from=start.init_from)
            return launch_and_report(words, fleet)
    finally:
        with suppress(OSError):
            path.rmdir()  # only if nothing was written there


def _autoscaled(arguments: Sequence[str], started: int, procs: int) -> dict[str, Any]:
    """Settings that short probes of this machine chose, printed with the reasons before anything starts.

    The probes run in a process of their own: a launcher that used a GPU would keep memory on it for the whole run.
    """
    if started > 1:
        raise ConfigError(
            "--autoscale probes one machine before its processes start, and torchrun has started them already.",
            "Let `lockstep train --autoscale --procs N` choose, and give torchrun the numbers it prints.",
        )
    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole()
    with temporary_directory("probe") as directory:
        out = directory / "choice.json"
        with console.status("probing this machine") as status:
            code = run_probe([PROBE, str(out), str(procs), *arguments], status.update)
        if code or not out.exists():
            raise ConfigError("the probes of --autoscale failed; their error is above.", "Train without --autoscale.")
        choice = json.loads(out.read_text())
    console.print("Scaled to this machine:")
    for reason in choice["reasons"]:
        console.print(f"  {reason}")
    settings: dict[str, Any] = choice["settings"]
    words = " ".join(f"{name}={value}" for name, value in settings.items())
    console.print(f"  the same again, without probing: {words}", soft_wrap=True)
    return settings


def run_probe(words: Sequence[str], progress: Callable[[str], None]) -> int:
    """Run `lockstep train WORDS` in a process of its own, with a call for every line it prints; its exit code."""
    command = [sys.executable, "-P", "-m", "lockstep", "train", *words]
    environment = os.environ | {ENV_PARENT_PID: str(os.getpid())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            progress(line.strip())
    return process.returncode


def _probe(out: Path, procs: int, arguments: Sequence[str]) -> int:
    """Probe this machine, print progress by line, and leave the choice in a file."""
    from lockstep.launch.device import configure_torch
    from lockstep.launch.world import WorldInfo
    from lockstep.tools.bench.autoscale import autoscale

    start, rest, _ = parse_start(arguments, "train", "")
    recipe: Recipe = parse_recipe(replace(start, procs=procs), rest, f"lockstep train {start.recipe}")
    configure_torch(recipe.run, WorldInfo(local_size=procs))

    def say(sentence: str) -> None:
        write_text(sys.stdout, sentence + "\n")

    choice = autoscale(recipe, procs, say)
    out.write_text(json.dumps({"settings": choice.settings, "reasons": choice.reasons}))
    return 0


def _without(arguments: Sequence[str], *names: str) -> list[str]:
    """The arguments less some flags and their values, which are for the launcher alone."""
    kept, skip = [], False
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, _ = word.lstrip("-").replace("_", "-").partition("=")
        if skip:
            skip = False
        elif name == "distributed":
            skip = not has_value and is_switch(following)
        elif name in names or word == "-n":
            skip = not has_value
        else:
            kept.append(word)
    return kept
