"""`lockstep audit SCRIPT [ARGUMENTS]`: check that all processes of a training script train the same model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.parser import parse_args
from lockstep.config import ConfigError
from lockstep.io.printable import print_line

if TYPE_CHECKING:
    from lockstep.tools.audit.analysis import AuditReport


@dataclass(frozen=True)
class Audit:
    """Run a PyTorch training script for a few optimizer steps and check that all processes train the same model.

    The script is any unchanged torchrun script; arguments after its name are passed to it. It runs normally and may
    write files. Exit code 0: no finding. 1: at least one finding. 2: the script could not be run.
    """

    script: tyro.conf.Positional[str]
    """Python file, or module with -m. Arguments after it are passed to the script."""
    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Number of processes."""
    steps: int = 5
    """Optimizer steps after which the script is stopped. Later steps are not checked."""
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"])] = False
    """Treat SCRIPT as a module name, as with python -m."""
    step_timeout: float = 30.0
    """Seconds without an optimizer step on any process that count as a hang. Tenfold before the first step."""
    ignore: tuple[str, ...] = ()
    """Kinds of findings that are intended: collectives, gradients, parameters, state, buffers, data."""
    json: bool = False
    """Print one JSON object instead of text."""


def run(arguments: Sequence[str]) -> int:
    audit_args, script_args = split_arguments(arguments)
    command = parse_args(Audit, audit_args, "lockstep audit")

    import json
    import os
    from dataclasses import asdict

    from lockstep.io.rich_console import PrintableConsole
    from lockstep.io.temporary_directory import temporary_directory
    from lockstep.tools.audit.analysis import KINDS, analyze
    from lockstep.tools.audit.launcher import run as run_script

    unknown = [kind for kind in command.ignore if kind not in KINDS]
    if unknown:
        raise ConfigError(f"--ignore {unknown[0]!r} is not a kind of finding.", f"Use one of: {', '.join(KINDS)}.")
    if command.procs < 2 or command.steps < 1:
        raise ConfigError(
            f"--procs is {command.procs} and --steps {command.steps}.",
            "Use at least 2 processes, because an audit compares them, and at least 1 step.",
        )
    if not command.module and not os.path.isfile(command.script):
        raise ConfigError(f"there is no script {command.script}.", "Use the path of a Python file, or -m MODULE.")
    args = [*(["-m"] if command.module else []), command.script, *script_args]
    with temporary_directory("audit") as directory:
        console = PrintableConsole(stderr=True)
        with console.status(f"running {command.script} on {command.procs} processes") as status:
            records = run_script(args, directory, command.procs, command.steps, command.step_timeout, status.update)
    if not any(record["steps"] for record in records):
        raise ConfigError(_unauditable(command.script, records), "Check that it runs under torchrun, and try again.")
    report = analyze(records)
    count = sum(finding.kind not in command.ignore for finding in report.findings)
    if command.json:
        print_line(json.dumps(asdict(report) | {"processes": command.procs}))
    else:
        _print(command, report, count)
    return 1 if count else 0


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those of `audit`, including the script, and those of the script."""
    takes_value = {"--procs", "-n", "--steps", "--step-timeout", "--ignore"}
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] in takes_value else 1
    audit_args, script_args = list(arguments[: index + 1]), list(arguments[index + 1 :])
    if index < len(arguments):
        audit_args = [audit_args[-1], *audit_args[:-1]]  # the script first: after --ignore it would be parsed as a kind
    return audit_args, script_args


def _unauditable(script: str, records: list[dict[str, Any]]) -> str:
    """Return why there is nothing to compare: the script failed, or it never stepped an optimizer."""
    failed = next((record for record in records if record["error"]), None)
    if failed is None:
        return f"{script} never stepped a torch optimizer, so there is nothing to audit."
    return (
        f"{script} failed before its first optimizer step, on process {failed['process']}: {failed['error']}\n"
        + failed["output"].rstrip()
    )


def _print(command: Audit, report: "AuditReport", count: int) -> None:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.audit.analysis import KINDS

    console = PrintableConsole(soft_wrap=True)
    console.print(f"{command.script} on {command.procs} processes, {report.steps} optimizer steps on every process\n")
    found = {finding.kind for finding in report.findings}
    for kind, statement in KINDS.items():
        if kind not in found:
            console.print(f"  {'?    ' if kind in report.unseen else '[green]yes[/green]  '} {statement}", markup=True)
    for finding in report.findings:
        ignored = finding.kind in command.ignore
        console.print("  [yellow]allow[/yellow]" if ignored else "  [red]NO[/red]   ", end="", markup=True)
        since = f", from step {finding.step}" if finding.step else ""
        console.print(f" {finding.what}{since}")
        for name in finding.tensors[:8]:
            console.print(f"          {name}")
        if len(finding.tensors) > 8:
            console.print(f"          and {len(finding.tensors) - 8} more")
        if finding.why:
            console.print(f"        why: {finding.why}.")
        console.print(f"        fix: {finding.fix}")
    for note in report.notes:
        console.print(f"  note  {note}")
    if count:
        console.print(f"\n[red]Not one model.[/red] {count} {'finding' if count == 1 else 'findings'}.", markup=True)
    else:
        console.print("\n[green]One model[/green], as far as these steps show.", markup=True)
