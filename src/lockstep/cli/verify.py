"""`lockstep verify RUN|EXPORT`: train random segments of a run again and compare them with its checkpoints."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.cli.parser import parse_args
from lockstep.cli.repeat import Repeater, count_processes
from lockstep.config import ConfigError
from lockstep.io.temporary_directory import temporary_directory

if TYPE_CHECKING:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.verify.history import RunHistory, Segment

SEED_LIMIT = 2**31
EXPORT_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Check that a run was trained as its files say: the chain of its checkpoints, and random segments trained again.

    A segment is the training between two checkpoints. It can be repeated if the checkpoint at its start is kept. Runs
    with exact reduction are verified on any number of processes, others on the number that trained the segment.

    For an export (.safetensors): find the checkpoint that it was made from, and compare the weights.

    Exit code 0: everything that was checked is equal. 1: refused; the message names the segment. 2: not possible here.
    """

    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN|EXPORT")]
    """Run directory, or a file of `lockstep export --to safetensors`."""
    segments: int = 3
    """Number of segments to train again. 0: only check the chain and the files."""
    procs: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 1
    """Processes that train a segment."""
    seed: int | None = None
    """Seed that chooses the segments. None: a random one, which is printed."""
    run: Path | None = None
    """For an export: the run that it was made from. None: the directory of the export, then runs/*."""
    allow_other_machine: bool = False
    """Try although this machine or its packages differ from those that trained the run."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Verify, arguments, "lockstep verify")
    if command.segments < 0 or command.procs < 1:
        raise ConfigError("--segments is negative or --procs is less than 1.", "Use --segments 3 --procs 1.")

    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole(soft_wrap=True)
    if command.path.suffix == EXPORT_SUFFIX:
        from lockstep.tools.verify.exports import verify_export

        with console.status(f"comparing {command.path} with its run"):
            lines, equal = verify_export(command.path, command.run)
        for line in lines:
            console.print(line, markup=False)
        return 0 if equal else 1

    from lockstep.tools.verify.history import read_history

    with console.status(f"checking the chain and the files of {command.path}"):
        history = read_history(command.path)
    for note in history.notes:
        console.print(note, markup=False)
    if history.problems:
        return _refuse(history.problems, command.path, console)
    return _verify_segments(command, history, console)


def _verify_segments(command: Verify, history: "RunHistory", console: "PrintableConsole") -> int:
    """Repeat random segments. Print what share of the run is verified."""
    from lockstep.tools.verify.repetition import choose_segments, share

    total, repeatable = history.samples, history.repeatable
    console.print(
        f"The chain of {command.path} is intact: {len(history.segments)} segments, of which {len(repeatable)} can be "
        f"trained again ({share(repeatable, total)}).",
        markup=False,
    )
    if len(repeatable) < len(history.segments):
        obstacles = sorted({segment.obstacle for segment in history.segments if segment.obstacle})
        console.print(f"  the others: {'; '.join(obstacles)}. --run.keep-every keeps more checkpoints.", markup=False)
    if not command.segments:
        return 0
    if not repeatable:
        raise ConfigError(f"no segment of {command.path} can be trained again.", "Keep checkpoints: --run.keep-every.")
    seed = secrets.randbelow(SEED_LIMIT) if command.seed is None else command.seed
    chosen = choose_segments(repeatable, command.segments, seed)
    numbers = ", ".join(str(segment.number) for segment in chosen)
    console.print(f"Training again: {numbers} (--seed {seed}), on {count_processes(command.procs)}.", markup=False)
    repeater = Repeater(command.path, command.procs, command.allow_other_machine, console)
    for segment in chosen:
        start = time.perf_counter()
        problem = _verify_segment(repeater, segment)
        if problem:
            warned = "; ".join(sorted(repeater.warned))
            causes = f". Differences here that may be the cause: {warned}" if warned else ""
            return _refuse([f"{segment}: {problem}{causes}."], command.path, console)
        console.print(f"  {segment}: bit-identical, {time.perf_counter() - start:.0f} s", markup=False)
    console.print(
        f"[green]Verified.[/green] {len(chosen)} of {len(history.segments)} segments, {share(chosen, total)}, were "
        "trained again with the same bits.",
        markup=True,
    )
    return 0


def _verify_segment(repeater: Repeater, segment: "Segment") -> str:
    """Repeat one segment. Return what differs; empty if nothing does."""
    from lockstep.checkpoint.format import CorruptCheckpointError
    from lockstep.tools.verify.repetition import compare

    with temporary_directory("verify") as directory:
        try:
            repeater.train(segment, directory)
        except CorruptCheckpointError as damage:
            return f"the checkpoint at its start is damaged: {damage}"
        return compare(segment, directory, repeater.run)


def _refuse(problems: Sequence[str], path: Path, console: "PrintableConsole") -> int:
    for problem in problems:
        console.print(problem, markup=False)
    console.print(f"[red]Refused.[/red] {len(problems)} problem{'s' * (len(problems) > 1)} of", end=" ", markup=True)
    console.print(f"{path}: it was not trained as its files say.", markup=False)
    return 1
