"""`lockstep ls`: list the runs in a directory with their state, progress and returns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from lockstep.cli.parser import parse_args
from lockstep.io.printable import print_line, printable

LISTED_METRICS = ("samples", "time/global_fps", "rollout/ep_return_mean", "eval/return_mean")
"""Metrics that are listed."""
HEADINGS = ("run", "recipe", "state", "steps", "of", "steps/s", "return", "eval")
TEXT_HEADINGS = HEADINGS[:3]
MAX_TABLE_ROWS = 200
"""More runs than this are listed as plain text, because rich tables are slow."""
_FORMAT = re.compile(r"^format: (\d{1,9})$", re.ASCII | re.MULTILINE)
_RECIPE = re.compile(r"^recipe: ([\w./-]{1,200})$", re.ASCII | re.MULTILINE)
_TOTAL_SAMPLES = re.compile(r"^run:\n(?:  .*\n)*?  total_samples: (\d{1,18})$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class List:
    """List the runs in a directory with their state, progress, throughput and returns."""

    dir: tyro.conf.Positional[Path] = Path("runs")
    """Directory that contains the run directories."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(List, arguments, "lockstep ls")

    from rich.table import Table

    from lockstep.io.jsonl import CONFIG
    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole()
    paths = sorted(path.parent for path in command.dir.glob(f"*/{CONFIG}"))
    if not paths:
        console.print(f"There are no runs in {command.dir}. Start one: lockstep train snake-ppo --smoke")
        return 0
    rows = [(printable(path.name, newlines=False), *_cells(path)) for path in paths]
    if len(rows) > MAX_TABLE_ROWS:
        print_line("\n".join(_aligned([HEADINGS, *rows])))
        return 0
    table = Table()
    for heading in HEADINGS:
        # Fold long cells instead of truncating them, so that run names can be copied.
        table.add_column(heading, justify="left" if heading in TEXT_HEADINGS else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return 0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as plain columns. A rich table takes about 1 ms per row."""
    padded = [(*row, *[""] * (len(HEADINGS) - len(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    alignments = ["<" if heading in TEXT_HEADINGS else ">" for heading in HEADINGS]
    template = "  ".join(f"{{:{alignment}{width}}}" for alignment, width in zip(alignments, widths, strict=True))
    return [template.format(*row).rstrip() for row in padded]


def _cells(path: Path) -> tuple[str, ...]:
    """Return the table cells of a run after its name."""
    from lockstep.checkpoint.format_version import UnknownFormat
    from lockstep.config import ConfigError
    from lockstep.io.jsonl import METRICS, newest_values, read_status

    try:
        recipe, total_samples = _read_config(path)
    except UnknownFormat as error:
        return (f"format {error.version} of another Lockstep version",)
    except ConfigError:
        return ("config.yaml cannot be read",)
    values = newest_values(path / METRICS, LISTED_METRICS)
    return (
        _truncated(Path(recipe).stem if isinstance(recipe, str) else recipe),
        _truncated(read_status(path).get("state", "-")),
        _number(values.get("samples", 0), ",.0f"),
        _number(total_samples, ",.0f"),
        _number(values.get("time/global_fps"), ",.0f"),
        _number(values.get("rollout/ep_return_mean"), ".2f"),
        _number(values.get("eval/return_mean"), ".2f"),
    )


def _read_config(path: Path) -> tuple[object, object]:
    """Return the recipe and the total samples of a run. Raise ConfigError if they cannot be read.

    Use regular expressions if the file has the usual layout, because parsing yaml takes 7 ms per run.
    """
    from lockstep.checkpoint.format_version import FORMAT, config_without_version
    from lockstep.config import read_yaml
    from lockstep.io.jsonl import CONFIG
    from lockstep.io.safe_read import YAML_BYTES, UnreadableFileError, read_text

    try:
        text = read_text(path / CONFIG, YAML_BYTES)
    except (OSError, UnreadableFileError):
        text = ""
    version, recipe, total_samples = _FORMAT.search(text), _RECIPE.search(text), _TOTAL_SAMPLES.search(text)
    if version and int(version[1]) == FORMAT and recipe and total_samples:
        return recipe[1], int(total_samples[1])
    config = config_without_version(read_yaml(path / CONFIG), path / CONFIG)
    run = config.get("run")
    return config.get("recipe"), run.get("total_samples") if isinstance(run, dict) else None


def _number(value: object, format_spec: str) -> str:
    """Format a number. Return "-" for other types and for integers that overflow a float."""
    try:
        return format(float(value), format_spec) if isinstance(value, int | float) else "-"
    except OverflowError:
        return "-"


def _truncated(value: object) -> str:
    """Return the first characters of an untrusted value, on one line."""
    return printable(value[:60], newlines=False) if isinstance(value, str) else "?"
