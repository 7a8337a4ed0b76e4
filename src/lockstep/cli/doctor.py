"""`lockstep doctor`: is this machine fit to train on, and if not, what mends it?"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.doctor.line import Line

TRIAL = "--trial"
"""What the processes are started with that train the small agent; it is no flag of the user's."""


@dataclass(frozen=True)
class Doctor:
    """Look at this machine, train a small agent on it in several processes, and say what is wrong and what mends it.

    Takes less than half a minute. Leaves with 1 if there is trouble; advice alone is no trouble.
    """

    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Processes to train the small agent on."""
    dir: Path = Path("runs")
    """Where runs will be kept."""
    bundle: bool = False
    """Print a block for a bug report instead: no names of yours, no addresses, no secrets."""


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == [TRIAL]:
        from lockstep.cli.launching import as_worker
        from lockstep.doctor.trial import take_part

        return as_worker(lambda: take_part(Path(arguments[1])))
    command = tyro.cli(Doctor, args=list(arguments), prog="lockstep doctor")
    if command.procs < 1:
        raise ConfigError(f"--procs is {command.procs}.", "Give at least 1.")

    from rich.console import Console

    lines: list[Line] = []
    console = Console(highlight=False, soft_wrap=True)
    with Console(stderr=True).status("looking around") as status:
        for line in _examine(command, status.update):
            lines.append(line)
            if not command.bundle:
                _print(console, line)
    if command.bundle:
        from lockstep.doctor.bundle import bundle

        sys.stdout.write(bundle(lines, command.procs))
        return int(any(line.level == "trouble" for line in lines))
    count = sum(line.level == "trouble" for line in lines)
    if count:
        console.print(f"\n[red]{count} {'trouble' if count == 1 else 'troubles'}.[/red] Each has its fix above.")
        return 1
    console.print(f"\n[green]All is well[/green] for {command.procs} process{'es' if command.procs > 1 else ''}.")
    return 0


def _examine(command: Doctor, tell: Callable[[str], None]) -> Iterator["Line"]:
    """Everything that is looked at, quick things first; the trial only where nothing stands in its way."""
    import os
    import tempfile

    from lockstep.doctor import disk, machine, network, rendering, variables
    from lockstep.runtime.hosts import interfaces

    quick = (
        machine.check_versions(),
        machine.check_devices(command.procs),
        machine.check_memory(command.procs),
        disk.check_disk(command.dir),
        network.check_network(os.environ),
        variables.check_variables(os.environ, interfaces(), command.procs),
        rendering.check_rendering(),
    )
    sound = True
    for lines in quick:
        for line in lines:
            sound = sound and line.level != "trouble"
            yield line
    if not sound:
        return
    tell(f"training a small agent, {command.procs} processes")
    from lockstep.doctor.trial import check_together

    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as directory:
        yield from check_together(["doctor", TRIAL, directory], command.procs, Path(directory))


def _print(console: "Console", line: "Line") -> None:
    colour, mark = {"well": ("green", "ok"), "advice": ("yellow", "advice"), "trouble": ("red", "TROUBLE")}[line.level]
    console.print(f"[{colour}]{mark:7}[/{colour}]  ", end="")
    console.print(f"{line.about:10}  {line.says}", markup=False)
    if line.fix:
        console.print(f"{'':21}fix: {line.fix}", markup=False)
