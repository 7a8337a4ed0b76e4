"""`lockstep verify-files RUN`: compare checkpoint files with their hashes and repair replay data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.cli.parser import parse_args


@dataclass(frozen=True)
class VerifyFiles:
    """Check every checkpoint file of a run for damage, and repair replay segments from their parity files.

    Exit code 0: all files are intact or were repaired. 1: damage remains, or a file could not be read. No file is
    deleted.
    """

    run: tyro.conf.Positional[Path]
    """Run directory."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(VerifyFiles, arguments, "lockstep verify-files")

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from lockstep.checkpoint.verification import count_bytes, scrub
    from lockstep.config import ConfigError
    from lockstep.io.jsonl import CHECKPOINTS
    from lockstep.io.rich_console import PrintableConsole

    if not (command.run / CHECKPOINTS).is_dir():
        raise ConfigError(f"{command.run} has no checkpoints.", "Use a run directory listed by `lockstep ls`.")
    console = PrintableConsole(soft_wrap=True)
    columns = TextColumn("checking"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    counts = {"whole": 0, "repaired": 0, "damaged": 0, "unreadable": 0}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            task = progress.add_task("checking", total=count_bytes(command.run))
            for checked in scrub(command.run):
                progress.advance(task, checked.size)
                counts[checked.state] += 1
                if checked.state != "whole":
                    console.print(f"{checked.state}: {checked.path}: {checked.details}", markup=False)
        except OSError as error:
            raise ConfigError(f"{command.run} cannot be read: {error}.", "Check permissions and disk.") from None
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == "whole")
    console.print(f"{command.run}: {sum(counts.values())} files: {summary}.", markup=False)
    if counts["damaged"]:
        console.print(
            "lockstep export still works for checkpoints with an intact shared.safetensors.\n"
            "lockstep resume --without-replay resumes with an empty replay buffer.",
            markup=False,
        )
    return 1 if counts["damaged"] or counts["unreadable"] else 0
