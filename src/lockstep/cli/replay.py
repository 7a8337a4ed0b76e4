"""`lockstep replay RUN --update N`: train up to one update again and write what went into it, or debug it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.cli.parser import parse_args
from lockstep.cli.repeat import Repeater
from lockstep.config import ConfigError
from lockstep.io.temporary_directory import temporary_directory

if TYPE_CHECKING:
    from lockstep.tools.verify.history import Segment

DEBUG_SECONDS = 7 * 86_400.0
"""Timeout of collectives while a user is in the debugger."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Train a run again up to one update, and write what goes into it: agent, batch, gradients and environments.

    The replay starts at the newest kept checkpoint before the update, or from the settings. Runs with exact reduction
    are replayed on any number of processes, others on the number that trained them. The run is not changed.
    """

    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    update: Annotated[int, tyro.conf.arg(aliases=["-u"], metavar="N")]
    """Number of the update, counted from 1."""
    dump: Path | None = None
    """Directory to write to. None: replays/update-N in the run directory; for a URL, in NAME in this directory."""
    debug: bool = False
    """Open the Python debugger in the update, on one process."""
    procs: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None
    """Processes. None: 1, or with fast reduction as many as have trained the run."""
    allow_other_machine: bool = False
    """Try although this machine or its packages differ from those that trained the run."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(ReplayOptions, arguments, "lockstep replay")
    if command.update < 1 or (command.procs is not None and command.procs < 1):
        raise ConfigError("--update or --procs is less than 1.", "Updates are counted from 1.")

    from lockstep.bucket_copy import url_of
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.replay.digests import samples_before
    from lockstep.tools.replay.dump import describe_step, read_dump
    from lockstep.tools.replay.starts import no_start, starts
    from lockstep.tools.verify.history import read_history

    console = PrintableConsole(soft_wrap=True)
    with console.status(f"checking the checkpoints of {command.path}"):
        history = read_history(command.path)
    for problem in history.problems:
        console.print(f"Warning: {problem}.", markup=False)
    before = samples_before(command.path, command.update)
    segment = next(iter(starts(history, before)), None)
    if segment is None:
        raise no_start(history, before)
    run_directory = command.path if url_of(command.path) is None else Path(command.path.name)
    target = (command.dump or run_directory / "replays" / f"update-{command.update}").absolute()
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty.", "Remove it, or choose another directory with --dump.")
    console.print(f"Replaying from {segment.first:,} samples.", markup=False)
    target.mkdir(parents=True, exist_ok=True)
    _train(command, segment, target, Repeater(command.path, command.procs, command.allow_other_machine, console))
    steps = read_dump(target)
    console.print(f"Update {command.update}, in iteration {steps[0].iteration}:", markup=False)
    for step in steps:
        console.print(f"  {describe_step(step)}", markup=False)
        console.print(f"    {step.path}", markup=False)
    console.print(
        "Each has lanes-*.safetensors (batch, loss and gradient of each lane), states-*.safetensors (environments) and "
        "shared.safetensors (agent before the update). Read them with safetensors.torch.load_file.",
        markup=False,
    )
    return 0


def _train(command: ReplayOptions, segment: "Segment", target: Path, repeater: Repeater) -> None:
    """Train up to the update, and compare the way there with the digests of the run."""
    from lockstep.checkpoint.format import CorruptCheckpointError
    from lockstep.tools.replay.digests import first_difference, read_digests
    from lockstep.update_trace import TraceOptions

    if command.debug and repeater.processes(segment) > 1:
        raise ConfigError(
            f"--debug needs one process, but this run with fast reduction was trained on {segment.end.processes}.",
            "Replay without --debug, or train with --run.reduction exact.",
        )
    overrides = {"run.collective_timeout": DEBUG_SECONDS} if command.debug else {}
    trace = TraceOptions(str(target), command.update, command.debug).as_dict()
    with temporary_directory("replay") as directory:
        try:
            replayed = repeater.train(segment, directory, overrides, command.debug, trace=trace)
        except CorruptCheckpointError as damage:
            raise ConfigError(
                f"the checkpoint at the start of the replay is damaged: {damage}.", "Restore it from a copy."
            ) from None
        compared, difference = first_difference(read_digests(command.path), read_digests(replayed))
    if difference:
        repeater.console.print(
            f"Warning: the replay differs from the run at {difference.samples:,} samples. Code, settings or packages "
            "are not those that trained it.",
            markup=False,
        )
    elif compared:
        repeater.console.print(f"The replay has the digests of the run ({compared} of {compared}).", markup=False)
