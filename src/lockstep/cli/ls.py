"""`lockstep ls`: the runs in a directory and where they stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class List:
    """List the runs in a directory: how far, how fast, how good."""

    dir: tyro.conf.Positional[Path] = Path("runs")
    """Where run directories are."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(List, args=list(arguments), prog="lockstep ls")

    import yaml
    from rich.console import Console
    from rich.table import Table

    from lockstep.config import read_yaml
    from lockstep.run.records import CONFIG, METRICS, last_values

    console = Console()
    paths = sorted(path.parent for path in command.dir.glob(f"*/{CONFIG}"))
    if not paths:
        console.print(
            f"There are no runs in {command.dir}. Start one: lockstep train snake-ppo --smoke", highlight=False
        )
        return 0
    table = Table()
    for heading in ("run", "recipe", "steps", "of", "steps/s", "return", "eval"):
        # Folded, never cut: a run's name is there to be copied.
        table.add_column(heading, justify="left" if heading in ("run", "recipe") else "right", overflow="fold")
    for path in paths:
        try:
            config = read_yaml(path / CONFIG)
        except (ValueError, yaml.YAMLError):
            table.add_row(path.name, "config.yaml cannot be read")
            continue
        values = last_values(path / METRICS)
        budget = config.get("run", {}).get("samples", 0)
        table.add_row(
            path.name,
            Path(str(config.get("recipe", "?"))).stem,
            f"{values.get('samples', 0):,.0f}",
            f"{budget:,}",
            _number(values.get("time/global_fps"), ",.0f"),
            _number(values.get("rollout/ep_return_mean"), ".2f"),
            _number(values.get("eval/return_mean"), ".2f"),
        )
    console.print(table)
    return 0


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
