"""`lockstep doctor`: check whether this machine can train, and print a fix for every problem found."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.cli.parser import parse_args
from lockstep.config import ConfigError
from lockstep.io.printable import print_line, write_text
from lockstep.tools.doctor.gpu.steps import STEP

if TYPE_CHECKING:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.doctor.finding import CheckResult

TRIAL = "--trial"
"""Internal first argument of the processes that train the small agent."""


@dataclass(frozen=True)
class Doctor:
    """Check this machine, train a small agent on it in several processes, and print a fix for every problem found.

    Takes less than half a minute, and a minute or two more if kernels have to be compiled, as by `lockstep warmup`.
    Exit code 1 if there is trouble; advice does not count. With --gpu, test everything on the GPUs instead, in less
    than 15 minutes, and write a report file.
    """

    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Number of processes that train the small agent."""
    dir: Path = Path("runs")
    """Directory for runs; its disk is checked."""
    bug_report: bool = False
    """Print a block for a bug report instead, without user names, addresses or secrets."""
    gpu: bool = False
    """Run every recipe, precision, proof, fault drill and benchmark on the GPUs of this machine."""
    out: Path | None = None
    """File that --gpu writes, without user names, addresses or secrets. None: report.json."""
    quick: bool = False
    """With --gpu: fewer recipes and smaller sizes, for a first test. Its throughput numbers are not meaningful."""


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == [TRIAL]:
        from lockstep.launch.failures import record_failure
        from lockstep.tools.doctor.smoke_test import worker_main

        try:
            worker_main(Path(arguments[1]))
        except Exception as error:
            record_failure(error)  # the launcher reports it
            return 1
        return 0
    if arguments[:1] == [STEP]:
        from lockstep.tools.doctor.gpu.worker import run_step

        return run_step(arguments[1:])
    command = parse_args(Doctor, arguments, "lockstep doctor")
    if command.procs < 1:
        raise ConfigError(f"--procs is {command.procs}.", "Use at least 1.")
    if command.gpu:
        return _test_gpus(command)
    if command.out is not None or command.quick:
        raise ConfigError("--out and --quick require --gpu.", "Use: lockstep doctor --gpu --out report.json")

    from lockstep.io.rich_console import PrintableConsole

    results: list[CheckResult] = []
    console = PrintableConsole(soft_wrap=True)
    # In a terminal, lines and spinner need one console: a second one does not erase the spinner before a line.
    spinner = console if console.is_terminal else PrintableConsole(stderr=True)
    with spinner.status("checking this machine") as status:
        for result in _examine(command, status.update):
            results.append(result)
            if not command.bug_report:
                _print(console, result)
    count = sum(result.level == "trouble" for result in results)
    if command.bug_report:
        from lockstep.tools.doctor.bug_report import write_bug_report

        write_text(sys.stdout, write_bug_report(results, command.procs))
    elif count:
        console.print(
            f"\n[red]{count} {'trouble' if count == 1 else 'troubles'}.[/red] Each has its fix above.",
            markup=True,
        )
    else:
        console.print(
            f"\n[green]All is well[/green] for {command.procs} process{'es' if command.procs > 1 else ''}.", markup=True
        )
    return int(count > 0)


def _test_gpus(command: Doctor) -> int:
    """Run the GPU tests. This process imports no torch and uses no GPU."""
    from lockstep.tools.doctor.gpu.runner import run_kit

    path = command.out or Path("report.json")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written.", "Choose a file in an existing directory.")
    report = run_kit(path, command.quick, print_line)
    if not report.finished:
        print_line(f"The report, without results from a GPU, is in {path}.")
        problem = next((step["reason"] for step in report.steps if step["result"] == "failed"), "no GPU was found.")
        raise ConfigError(
            problem,
            "Check that `nvidia-smi` lists the GPUs, that CUDA_VISIBLE_DEVICES does not hide them, and that torch is "
            "built for CUDA: https://pytorch.org/get-started/locally",
        )
    print_line("")
    for line in report.summary:
        print_line(line)
    failed = f"{len(report.failed)} of {len(report.steps)} steps failed" if report.failed else "No step failed"
    print_line(
        f"\n{failed} in {report.seconds:.0f} s. The report is in {path}; please attach it to an issue about GPUs."
    )
    return int(bool(report.failed))


def _examine(command: Doctor, set_status: Callable[[str], None]) -> Iterator["CheckResult"]:
    """Run all checks, quick ones first. Train the small agent only if no check found trouble."""
    import os

    from lockstep.io.temporary_directory import temporary_directory
    from lockstep.launch.rendezvous import interfaces
    from lockstep.tools.doctor import disk, environment, gymnasium_packages, machine, network, rendering

    checks = (
        machine.check_versions(),
        machine.check_devices(command.procs),
        machine.check_memory(command.procs),
        disk.check_disk(command.dir),
        network.check_network(os.environ),
        environment.check_variables(os.environ, interfaces(), command.procs),
        rendering.check_rendering(),
        gymnasium_packages.check_gymnasium_packages(),
    )
    passed = True
    for results in checks:
        for result in results:
            passed = passed and result.level != "trouble"
            yield result
    if not passed:
        return
    set_status("compiling numba kernels")
    from lockstep.tools.doctor.kernels import check_kernels

    yield check_kernels(set_status)
    set_status(f"training a small agent on {command.procs} processes")
    from lockstep.tools.doctor.smoke_test import check_distributed

    with temporary_directory("doctor") as directory:
        yield from check_distributed(["doctor", TRIAL, str(directory)], command.procs, directory)


def _print(console: "PrintableConsole", result: "CheckResult") -> None:
    from rich.text import Text

    color, mark = {"well": ("green", "ok"), "advice": ("yellow", "advice"), "trouble": ("red", "TROUBLE")}[result.level]
    label = f"{mark:7}  {result.subject:10}  "
    lines = [result.message, *([f"fix: {result.fix}"] if result.fix else [])]
    if console.is_terminal:  # wrap under the message; in a file, one line per message
        wrapped = [Text(line).wrap(console, max(console.width - len(label), 20)) for line in lines]
        lines = [part.plain for parts in wrapped for part in parts]
    text = Text(label + f"\n{'':{len(label)}}".join(lines))
    text.stylize(color, 0, len(mark))
    console.print(text)
