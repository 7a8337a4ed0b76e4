"""`lockstep audit SCRIPT [ARGUMENTS]`: do the processes of any training script train one model?"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.config import ConfigError
from lockstep.io.printable import write_text

if TYPE_CHECKING:
    from lockstep.tools.audit.analysis import AuditReport


@dataclass(frozen=True)
class Audit:
    """Run a PyTorch training script on several processes for a few optimizer steps: do they train one model?

    The script is any that runs under torchrun, unchanged; what follows its name is for it. It does all that it does
    otherwise, also to your files. Leaves with 0 if nothing was found, 1 on a finding, 2 if it could not be run.
    """

    script: tyro.conf.Positional[str]
    """A Python file, or with -m a module; everything after it is the script's own."""
    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Processes to run it on."""
    steps: int = 5
    """Optimizer steps after which it is stopped; what happens later is not seen."""
    module: Annotated[bool, tyro.conf.arg(aliases=["-m"])] = False
    """SCRIPT is the name of a module, as with python -m."""
    step_timeout: float = 30.0
    """Seconds without a step on any process (ten times as many before the first) that count as a hang."""
    ignore: tuple[str, ...] = ()
    """Findings that are meant to be: collectives, gradients, parameters, state, buffers, data."""
    json: bool = False
    """Print one json object instead of words."""


def run(arguments: Sequence[str]) -> int:
    own, script = part(arguments)
    command = tyro.cli(Audit, args=own, prog="lockstep audit")

    import json
    import os
    from dataclasses import asdict

    from lockstep.io.rich_console import PrintableConsole
    from lockstep.io.temporary_directory import temporary_directory
    from lockstep.tools.audit.analysis import KINDS, analyze
    from lockstep.tools.audit.launcher import run as run_script

    unknown = [kind for kind in command.ignore if kind not in KINDS]
    if unknown:
        raise ConfigError(f"--ignore {unknown[0]!r} is no kind of finding.", f"They are: {', '.join(KINDS)}.")
    if command.procs < 2 or command.steps < 1:
        raise ConfigError(
            f"--procs is {command.procs} and --steps {command.steps}.",
            "An audit compares processes: give at least 2, and at least one step.",
        )
    if not command.module and not os.path.isfile(command.script):
        raise ConfigError(f"there is no script {command.script}.", "Give the path of a Python file, or -m MODULE.")
    words = [*(["-m"] if command.module else []), command.script, *script]
    with temporary_directory("audit") as directory:
        console = PrintableConsole(stderr=True)
        with console.status(f"running {command.script} on {command.procs} processes") as status:
            records = run_script(
                words, directory, command.procs, command.steps, command.step_timeout, lambda w: status.update(w)
            )
    if not any(record["steps"] for record in records):
        raise ConfigError(_unauditable(command.script, records), "See that it runs under torchrun, and try again.")
    verdict = analyze(records)
    wrong = [finding for finding in verdict.findings if finding.kind not in command.ignore]
    if command.json:
        write_text(sys.stdout, json.dumps(asdict(verdict) | {"processes": command.procs}) + "\n")
    else:
        _print(command, verdict)
    return 1 if wrong else 0


def part(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for the audit, up to and with the script, and those after it, which are the script's."""
    takes_value = {"--procs", "-n", "--steps", "--step-timeout", "--ignore"}
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        place += 2 if arguments[place] in takes_value else 1
    own, script = list(arguments[: place + 1]), list(arguments[place + 1 :])
    if place < len(arguments):
        own = [own[-1], *own[:-1]]  # the script first: what follows --ignore would be taken for a kind
    return own, script


def _unauditable(script: str, records: list[dict[str, Any]]) -> str:
    """Why there is nothing to judge: the script failed, or it never stepped an optimizer."""
    failed = next((record for record in records if record["error"]), None)
    if failed is None:
        return f"{script} took no step of a torch optimizer, which is what an audit watches."
    return (
        f"{script} failed before its first optimizer step, on process {failed['process']}: {failed['error']}\n"
        + failed["output"].rstrip()
    )


def _print(command: Audit, verdict: "AuditReport") -> None:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.audit.analysis import KINDS

    console = PrintableConsole(soft_wrap=True)
    console.print(f"{command.script} on {command.procs} processes, {verdict.steps} optimizer steps by all\n")
    found = {finding.kind for finding in verdict.findings}
    for kind, right in KINDS.items():
        if kind not in found:
            console.print(f"  {'?    ' if kind in verdict.unseen else '[green]yes[/green]  '} {right}", markup=True)
    for finding in verdict.findings:
        allowed = finding.kind in command.ignore
        console.print("  [yellow]meant[/yellow]" if allowed else "  [red]NO[/red]   ", end="", markup=True)
        since = f", from step {finding.step}" if finding.step else ""
        console.print(f" {finding.what}{since}")
        for name in finding.tensors[:8]:
            console.print(f"          {name}")
        if len(finding.tensors) > 8:
            console.print(f"          and {len(finding.tensors) - 8} more")
        if finding.why:
            console.print(f"        why: {finding.why}.")
        console.print(f"        fix: {finding.fix}")
    for note in verdict.notes:
        console.print(f"  note  {note}")
    wrong = sum(finding.kind not in command.ignore for finding in verdict.findings)
    if wrong:
        console.print(f"\n[red]Not one model.[/red] {wrong} {'finding' if wrong == 1 else 'findings'}.", markup=True)
    else:
        console.print("\n[green]One model[/green], as far as these steps show.", markup=True)
