"""`lockstep bench RECIPE`: measure the throughput of a recipe, compare it with the bare engine, name the bottleneck."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve
from lockstep.config import ConfigError, Recipe
from lockstep.io.printable import print_line
from lockstep.io.temporary_directory import temporary_directory


@dataclass(frozen=True, kw_only=True)
class Bench(RecipeOptions):
    """Measure the throughput and time split of a recipe, and compare it with its bare environments and networks.

    Accepts settings of the recipe, as `train` does. No run directory is created.
    """

    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Number of processes on this machine."""
    scaling: str | None = None
    """Numbers of processes to compare at the same global batch, such as 1,2,4. None: --procs only."""
    seconds: float = 10.0
    """Approximate duration of a measurement in seconds, for each number of processes."""
    json: bool = False
    """Print one JSON object instead of a table."""
    out: Path | None = None
    """Directory for bench.json and bench.svg. In a run directory, `lockstep report` shows them. None: not written."""


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(Bench, arguments, "bench")
    sizes = _sizes(command)

    from lockstep.cli.workers import started_processes

    recipe = resolve(parse_recipe(command, rest, f"lockstep bench {command.recipe}"), max(sizes))
    if started_processes():  # a worker: measure, and let rank 0 write the report
        from lockstep.distributed import Runtime
        from lockstep.tools.bench.measure import measure

        with Runtime.start(recipe.run) as runtime:
            report = measure(recipe, runtime, command.seconds)
            if runtime.is_main and command.out is not None:
                (command.out / "bench.json").write_text(json.dumps(report))
        return 0

    from lockstep.launch.device import require_gpus
    from lockstep.tools.bench.busy import warn_if_busy

    require_gpus(recipe.run.device, max(sizes), recipe.run.share_gpu)
    warn_if_busy()
    reports = [_measure(command, rest, recipe, processes) for processes in sizes]
    _present(command, reports)
    return 0


def _sizes(command: Bench) -> list[int]:
    if command.scaling is None:
        return [command.procs]
    sizes = [int(text) for text in command.scaling.split(",") if text.strip().isdigit()]
    if not sizes or min(sizes) < 1 or len(sizes) != len(command.scaling.split(",")):
        raise ConfigError(f"--scaling is {command.scaling!r}.", "Use numbers of processes, such as --scaling 1,2,4.")
    return sizes


def _measure(command: Bench, rest: list[str], recipe: Recipe, processes: int) -> dict[str, Any]:
    """Start new processes, measure, and return the report."""
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.launcher import launch_captured

    console = PrintableConsole(stderr=True)
    args = ["bench", command.recipe, *rest, *command.flags(), "--seconds", str(command.seconds)]
    args.append(f"run.lanes={recipe.run.lanes}")
    count = "1 process" if processes == 1 else f"{processes} processes"
    with (
        temporary_directory("bench") as directory,
        console.status(f"measuring {command.recipe} on {count}: a warm-up, then about {command.seconds:.0f} s"),
    ):
        cause = launch_captured([*args, "--out", str(directory)], processes)
        if cause:
            raise ConfigError(f"{command.recipe} could not be measured on {count}: {cause}")
        report: dict[str, Any] = json.loads((directory / "bench.json").read_text())
    return report


def _present(command: Bench, reports: list[dict[str, Any]]) -> None:
    from lockstep.tools.bench.measure import verdict
    from lockstep.tools.bench.plots import draw

    first = reports[0]
    for report in reports:
        report["verdict"] = verdict(report)
        report["speedup"] = report["steps_per_second"] / first["steps_per_second"]
    result = first | ({"scaling": reports} if len(reports) > 1 else {})
    if command.out is not None:
        command.out.mkdir(parents=True, exist_ok=True)
        (command.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
        (command.out / "bench.svg").write_text(draw(reports))
    if command.json:
        print_line(json.dumps(result))
    else:
        _print(command.recipe, reports)


def _print(name: str, reports: list[dict[str, Any]]) -> None:
    from rich.table import Column, Table

    from lockstep.io.rich_console import PrintableConsole

    first = reports[0]
    console = PrintableConsole()
    title = f"{name}: {first['parameters']:,} parameters, {first['precision']}"
    columns = [Column(str(report["processes"]), justify="right") for report in reports]
    table = Table("processes", *columns)
    table.add_row("threads each", *(str(report["threads"]) for report in reports))
    table.add_row("steps/s", *(f"{report['steps_per_second']:,.0f}" for report in reports))
    table.add_row("speed-up", *(f"{report['speedup']:.2f}x" for report in reports))
    for phase in first["split"]:
        table.add_row(f"  {phase}", *(f"{report['split'][phase]:.1%}" for report in reports))
    table.add_row("ratio to bare", *(f"{report['ratio_to_bare']:.3f}" for report in reports))
    console.print(title)  # not the title of the table, which wraps to the width of the table
    console.print(table)
    if len(reports) > 1:
        console.print("The global batch is the same for every number of processes (strong scaling).")
    console.print(reports[-1]["verdict"])
