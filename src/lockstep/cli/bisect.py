"""`lockstep bisect RUN_A RUN_B`: name the first iteration, update and tensor in which two runs differ."""

import math
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
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.bisect.search import Found, Start
    from lockstep.tools.replay.digests import Difference
    from lockstep.tools.verify.history import RunHistory

SHOWN = 5
"""Differing tensors that are printed."""


@dataclass(frozen=True, kw_only=True)
class Bisect:
    """Find the first iteration, update and tensor in which two runs differ.

    The digest logs name the iteration. Both runs are then trained again from the newest checkpoint that is equal in
    both, or from their settings, with digests of every update, and once more up to the first update that differs. Runs
    of recipes in Python files use each its own file, so two versions of a recipe can be compared. The runs are not
    changed.

    Exit code 0: the runs are equal. 1: they differ. 2: not possible here.
    """

    one: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_A")]
    """Run directory."""
    other: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_B")]
    """Run directory."""
    dump: Path | None = None
    """Directory to keep all tensors of the first differing update of both runs in. None: they are not kept."""
    procs: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None
    """Processes. None: 1, or with fast reduction as many as have trained the run."""
    allow_other_machine: bool = False
    """Try although this machine or its packages differ from those that trained the runs."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Bisect, arguments, "lockstep bisect")
    if command.procs is not None and command.procs < 1:
        raise ConfigError("--procs is less than 1.", "Use --procs 1.")
    if command.dump is not None and command.dump.exists() and any(command.dump.iterdir()):
        raise ConfigError(f"{command.dump} is not empty.", "Remove it, or choose another directory with --dump.")

    from lockstep.checkpoint.errors import CorruptCheckpointError
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.replay.digests import first_difference, read_digests

    console = PrintableConsole(soft_wrap=True)
    digests = read_digests(command.one), read_digests(command.other)
    compared, difference = first_difference(*digests)
    if max(digests[0].keys() & digests[1].keys(), default=0) == 0 and difference is None:
        raise ConfigError(
            f"{command.one} and {command.other} have no digests at the same numbers of samples after the start.",
            "Train with digests (run.digest_every), and with equal sizes of iterations.",
        )
    for line in differing_settings(command.one, command.other):
        console.print(f"Setting: {line}", markup=False)
    if difference is None:
        last = max(digests[0].keys() & digests[1].keys())
        console.print(f"Equal. All {compared} digests up to {last:,} samples are the same.", markup=False)
        return 0
    console.print(
        f"The digests of {'agent' if difference.agent else 'metrics'} differ first after iteration "
        f"{difference.iteration:,} ({difference.samples:,} samples).",
        markup=False,
    )
    with temporary_directory("bisect") as directory:
        try:
            _bisect(command, difference, directory, console)
        except CorruptCheckpointError as damage:
            raise ConfigError(f"a checkpoint is damaged: {damage}.", "Restore it from a copy.") from None
    return 1


def differing_settings(one: Path, other: Path) -> list[str]:
    """Return a line for each setting of two runs that differs, without those of their directories."""
    from lockstep.checkpoint.chain import plain_settings
    from lockstep.run_dir import read_config
    from lockstep.tools.verify.history import changed_settings

    return list(changed_settings(*(plain_settings(*read_config(path)) for path in (one, other))).values())


def _bisect(command: Bisect, difference: "Difference", directory: Path, console: "PrintableConsole") -> None:
    """Repeat both runs around the difference and print what differs first."""
    from lockstep.tools.bisect.search import common_start
    from lockstep.tools.replay.starts import no_start
    from lockstep.tools.verify.history import read_history

    histories: list[RunHistory] = []
    for path in (command.one, command.other):
        with console.status(f"checking the checkpoints of {path}"):
            histories.append(read_history(path))
    start = common_start(histories[0], histories[1], difference.equal_until)
    if start is None:
        for history in histories:
            if not history.repeatable:
                raise no_start(history, difference.equal_until)
        raise ConfigError(
            f"the runs have no kept checkpoint in common before {difference.equal_until:,} samples that is equal in "
            "both.",
            "Keep checkpoints of future runs with --run.keep-every.",
        )
    console.print(f"Training both again from {start.one.first:,} samples.", markup=False)
    repeaters = [
        Repeater(path, command.procs, command.allow_other_machine, console) for path in (command.one, command.other)
    ]
    found = _compare(repeaters, start, difference, directory)
    if isinstance(found, str):
        console.print(found, markup=False)
        return
    _print_iteration(found, console)
    if found.update is not None:
        _print_update(command, repeaters, start, found, directory, console)


def _compare(repeaters: list[Repeater], start: "Start", difference: "Difference", directory: Path) -> "Found | str":
    """Train both runs again with traces of all tensors and updates, and compare them. A text says why none differ."""
    from lockstep.tools.bisect.search import compare_traces, read_steps
    from lockstep.tools.replay.digests import first_difference, read_digests
    from lockstep.update_trace import TraceOptions

    traced = []
    for name, repeater, segment in zip("ab", repeaters, start, strict=True):
        place, trace = directory / f"trace-{name}", directory / f"updates-{name}"
        place.mkdir()
        trace.mkdir()
        options = TraceOptions(str(trace)).as_dict()
        overrides = {"run.log_tensor_digests": True}
        again = repeater.train(segment, place, overrides, trace=options, stop_at=difference.samples)
        digests = read_digests(again)
        if (unlike := first_difference(read_digests(repeater.run), digests)[1]) is not None:
            repeater.console.print(
                f"Warning: {repeater.run} is not repeated here: it differs from its own digests after iteration "
                f"{unlike.iteration:,}. Code, packages or machine are not those that trained it.",
                markup=False,
            )
        traced.append((digests, read_steps(trace)))
    (one, steps), (other, other_steps) = traced
    if (found := compare_traces((one, other), (steps, other_steps))) is not None:
        return found
    if first_difference(one, other)[1] is not None:
        return "Only metrics differ: no tensor after an iteration, and no batch of an update."
    return (
        "Trained again here, both are equal. The difference comes from the machines, the packages or the code that "
        "trained them."
    )


def _print_iteration(found: "Found", console: "PrintableConsole") -> None:
    console.print(f"Iteration {found.iteration:,} is the first after which tensors differ:", markup=False)
    for name in found.tensors[:SHOWN]:
        console.print(f"  {name}", markup=False)
    if len(found.tensors) > SHOWN:
        console.print(f"  and {len(found.tensors) - SHOWN} more", markup=False)
    if found.update is None:
        console.print("No update has a different batch or result up to there.", markup=False)


def _print_update(
    command: Bisect,
    repeaters: list[Repeater],
    start: "Start",
    found: "Found",
    directory: Path,
    console: "PrintableConsole",
) -> None:
    """Dump the first differing update of both runs and print its differing tensors."""
    from lockstep.tools.bisect.search import largest_differences
    from lockstep.tools.replay.dump import read_dump
    from lockstep.update_trace import TraceOptions

    dumps = []
    for name, repeater, segment in zip("ab", repeaters, start, strict=True):
        place, target = directory / f"dump-{name}", (command.dump or directory / "dumps").absolute() / name
        place.mkdir()
        target.mkdir(parents=True)
        repeater.train(segment, place, trace=TraceOptions(str(target), found.update).as_dict())
        dumps.append(read_dump(target))
    what = "gets different inputs" if found.inputs_differ else "computes something else from equal inputs"
    console.print(
        f"Update {found.update}, in iteration {found.update_iteration:,}, is the first that {what}:", markup=False
    )
    for one, other in zip(*dumps, strict=False):
        title = f"{one.loss} ({one.where})" if one.where else one.loss
        differences = {
            **largest_differences(one.agent(), other.agent()),
            **largest_differences(one.lanes(), other.lanes()),
        }
        if not differences:
            console.print(f"  {title}: nothing differs", markup=False)
            continue
        console.print(f"  {title}: {len(differences)} tensors differ", markup=False)
        ordered = sorted(differences, key=lambda name: _order(name, differences[name]))
        for name in ordered[:SHOWN]:
            size = differences[name]
            console.print(f"    {name}" + (f" by up to {size:.3g}" if size is not None else ""), markup=False)
        if len(ordered) > SHOWN:
            console.print(f"    and {len(ordered) - SHOWN} more", markup=False)
    if command.dump is not None:
        console.print(f"All tensors: {command.dump}", markup=False)


def _order(name: str, difference: float | None) -> tuple[int, float, str]:
    """Order tensors by cause: batch, agent, loss, gradient. Among each, the largest difference comes first."""
    kinds = (".batch.", "algorithm.", ".loss.", ".gradient.")
    rank = next((rank for rank, kind in enumerate(kinds) if kind in name), len(kinds))
    return rank, -math.inf if difference is None else -difference, name
