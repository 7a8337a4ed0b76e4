"""`lockstep ls`: the runs in a directory and where they stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.printable import printable


@dataclass(frozen=True)
class List:
    """List the runs in a directory: how far, how fast, how good."""

    dir: tyro.conf.Positional[Path] = Path("runs")
    """Where run directories are."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(List, args=list(arguments), prog="lockstep ls")

    from rich.table import Table

    from lockstep.config import ConfigError, read_yaml
    from lockstep.console import Console
    from lockstep.run.records import CONFIG, METRICS, last_values, read_status

    console = Console()
    paths = sorted(path.parent for path in command.dir.glob(f"*/{CONFIG}"))
    if not paths:
        console.print(f"There are no runs in {command.dir}. Start one: lockstep train snake-ppo --smoke")
        return 0
    table = Table()
    for heading in ("run", "recipe", "state", "steps", "of", "steps/s", "return", "eval"):
        # Folded, never cut: a run's name is there to be copied.
        table.add_column(heading, justify="left" if heading in ("run", "recipe", "state") else "right", overflow="fold")
    for path in paths:
        try:
            config = read_yaml(path / CONFIG)
        except ConfigError:
            table.add_row(printable(path.name, newlines=False), "config.yaml cannot be read")
            continue
        values, run = last_values(path / METRICS), config.get("run")
        table.add_row(
            printable(path.name, newlines=False),
            _short(config.get("recipe")).rpartition("/")[2].removesuffix(".py"),
            _short(read_status(path).get("state", "-")),
            _number(values.get("samples", 0), ",.0f"),
            _number(run.get("samples") if isinstance(run, dict) else None, ",.0f"),
            _number(values.get("time/global_fps"), ",.0f"),
            _number(values.get("rollout/ep_return_mean"), ".2f"),
            _number(values.get("eval/return_mean"), ".2f"),
        )
    console.print(table)
    return 0


def _number(value: object, form: str) -> str:
    """A number of a run's files as it is shown; what is none, or has hundreds of digits, is not."""
    try:
        return format(float(value), form) if isinstance(value, int | float) else "-"
    except OverflowError:
        return "-"


def _short(value: object) -> str:
    """The beginning of a value in a foreign file, on one line."""
    return printable(value[:60], newlines=False) if isinstance(value, str) else "?"
