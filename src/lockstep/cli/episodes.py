"""`lockstep episodes SOURCE... --out DIR`: write a data set of episodes for offline training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.cli.parser import parse_args


@dataclass(frozen=True)
class Episodes:
    """Write a data set of episodes for offline training, `train dmc-tdmpc2 --algo.offline.data DIR`.

    Sources are runs, whose replay buffers are read, or chunks of the authors' TD-MPC2 (.pt). Those are read without
    unpickling them: no code in them is executed.
    """

    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, or .pt files of the authors' data sets."""
    out: Path
    """Directory to create."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks in .pt files, in the order of their numbers, or mt30."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Episodes, arguments, "lockstep episodes")

    from lockstep.config import ConfigError
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tasks.dm_control.suite import SETS
    from lockstep.tools.episodes.convert import write_episodes

    if not command.sources:
        raise ConfigError("no source is given.", "Give runs, or .pt files: lockstep episodes runs/NAME --out data")
    console = PrintableConsole(soft_wrap=True)
    tasks = [name for given in command.tasks for part in given.split(",") for name in SETS.get(part, (part,))]
    with console.status(f"writing {command.out}"):
        written = write_episodes(command.sources, command.out, tasks)
    tasks_text = "1 task" if len(written.tasks) == 1 else f"{len(written.tasks)} tasks"
    console.print(f"{command.out}: {written.episodes:,} episodes, {written.steps:,} steps, {tasks_text}")
    console.print(f"  train  lockstep train dmc-tdmpc2 --algo.offline.data {command.out} --algo.offline.samples 10000")
    return 0
