"""`lockstep ls`: the runs in a directory and where they stand."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.io.printable import printable, write_text

SHOWN = ("samples", "time/global_fps", "rollout/ep_return_mean", "eval/return_mean")
"""Logged quantities that are listed."""
HEADINGS = ("run", "recipe", "state", "steps", "of", "steps/s", "return", "eval")
WORDS = HEADINGS[:3]
MANY = 200
"""More runs than this are listed without a frame."""
_FORMAT = re.compile(r"^format: (\d{1,9})$", re.ASCII | re.MULTILINE)
_RECIPE = re.compile(r"^recipe: ([\w./-]{1,200})$", re.ASCII | re.MULTILINE)
_BUDGET = re.compile(r"^run:\n(?:  .*\n)*?  total_samples: (\d{1,18})$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class List:
    """List the runs in a directory: how far, how fast, how good."""

    dir: tyro.conf.Positional[Path] = Path("runs")
    """Where run directories are."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(List, args=list(arguments), prog="lockstep ls")

    from rich.table import Table

    from lockstep.io.jsonl import CONFIG
    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole()
    paths = sorted(path.parent for path in command.dir.glob(f"*/{CONFIG}"))
    if not paths:
        console.print(f"There are no runs in {command.dir}. Start one: lockstep train snake-ppo --smoke")
        return 0
    rows = [(printable(path.name, newlines=False), *_cells(path)) for path in paths]
    if len(rows) > MANY:
        write_text(sys.stdout, "".join(_aligned([HEADINGS, *rows])))
        return 0
    table = Table()
    for heading in HEADINGS:
        # Folded, never cut: a run's name is there to be copied.
        table.add_column(heading, justify="left" if heading in WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return 0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain columns: rich takes a millisecond for each row of a table."""
    whole = [(*row, *[""] * (len(HEADINGS) - len(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    sides = ["<" if heading in WORDS else ">" for heading in HEADINGS]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*row).rstrip() + "\n" for row in whole]


def _cells(path: Path) -> tuple[str, ...]:
    """What is shown of a run beside its name."""
    from lockstep.checkpoint.migrations import UnknownFormat
    from lockstep.config import ConfigError
    from lockstep.io.jsonl import METRICS, read_status
    from lockstep.io.jsonl_tail import newest_values

    try:
        recipe, budget = _read_config(path)
    except UnknownFormat as error:
        return (f"format {error.version}, of another version of Lockstep",)
    except ConfigError:
        return ("config.yaml cannot be read",)
    values = newest_values(path / METRICS, SHOWN)
    return (
        _short(Path(recipe).stem if isinstance(recipe, str) else recipe),
        _short(read_status(path).get("state", "-")),
        _number(values.get("samples", 0), ",.0f"),
        _number(budget, ",.0f"),
        _number(values.get("time/global_fps"), ",.0f"),
        _number(values.get("rollout/ep_return_mean"), ".2f"),
        _number(values.get("eval/return_mean"), ".2f"),
    )


def _read_config(path: Path) -> tuple[object, object]:
    """The recipe and the total samples of a run. ConfigError where they cannot be read.

    They are found by two searches where the file is as lockstep writes it: to parse yaml takes 7 ms for each run.
    """
    from lockstep.checkpoint.migrations import FORMAT, migrate_config
    from lockstep.config import read_yaml
    from lockstep.io.jsonl import CONFIG
    from lockstep.io.safe_read import YAML_BYTES, UnreadableFileError, read_text

    try:
        text = read_text(path / CONFIG, YAML_BYTES)
    except (OSError, UnreadableFileError):
        text = ""
    version, recipe, budget = _FORMAT.search(text), _RECIPE.search(text), _BUDGET.search(text)
    if version and int(version[1]) == FORMAT and recipe and budget:
        return recipe[1], int(budget[1])
    config = migrate_config(read_yaml(path / CONFIG), path / CONFIG)
    run = config.get("run")
    return config.get("recipe"), run.get("total_samples") if isinstance(run, dict) else None


def _number(value: object, form: str) -> str:
    """A number of a run's files as it is shown; what is none, or has hundreds of digits, is not."""
    try:
        return format(float(value), form) if isinstance(value, int | float) else "-"
    except OverflowError:
        return "-"


def _short(value: object) -> str:
    """The beginning of a value in a foreign file, on one line."""
    return printable(value[:60], newlines=False) if isinstance(value, str) else "?"
