"""`lockstep backtest RECIPE --data FILE`: run a walk-forward backtest on a price file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve
from lockstep.config import ConfigError

if TYPE_CHECKING:
    from lockstep.apps.backtest.walk_forward import BacktestReport


@dataclass(frozen=True, kw_only=True)
class Backtest(RecipeOptions):
    """Train a new agent for each fold on the bars before it, trade the fold, and join the folds into one equity curve.

    Accepts settings of the recipe, as `train` does.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """Recipe with the trading task, such as trading-lstm."""
    folds: int = 4
    """Number of consecutive test folds."""
    train_fraction: float = 0.5
    """Fraction of the bars that the first agent trains on. Later agents train on all bars before their fold."""
    out: Path = Path("backtest")
    """Output directory for the runs of the folds, backtest.png and backtest.html. It must not contain any yet."""


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(Backtest, arguments, "backtest")
    if command.folds < 1 or not 0 < command.train_fraction < 1:
        raise ConfigError(
            f"--folds is {command.folds} and --train-fraction is {command.train_fraction}.",
            "Use at least 1 fold and a fraction between 0 and 1.",
        )
    recipe = resolve(parse_recipe(command, rest, f"lockstep backtest {command.recipe}"), 1)

    from lockstep.apps.backtest.walk_forward import walk_forward
    from lockstep.tasks.trading.env import TradingConfig

    if not isinstance(recipe.task, TradingConfig):
        raise ConfigError(
            f"{command.recipe} does not have the trading task.", "Use trading-lstm, or a recipe with the trading task."
        )
    report = walk_forward(recipe, command.out, command.folds, command.train_fraction)
    _present(report, command.out)
    return 0


def _present(report: "BacktestReport", out: Path) -> None:
    from rich.table import Column, Table

    from lockstep.apps.backtest.metrics import SUSPICIOUS, possible_leak
    from lockstep.apps.backtest.plots import draw, format_metrics, write_page
    from lockstep.io.rich_console import PrintableConsole

    bars_per_year = report.bars.bars_per_year
    metrics = {name: curve.measures(bars_per_year) for name, curve in report.curves.items()}
    agent = metrics["agent"]
    notes = [
        f"{len(report.time):,} bars in {agent.years:.1f} years out of sample, marked at each open, after all costs; "
        f"annualized with {bars_per_year:,.0f} bars a year.",
        *report.bars.notes,
    ]
    leak = f"possible leak: a Sharpe ratio of {agent.sharpe:.1f} over a year or more is above {SUSPICIOUS}."
    warnings = [leak] if possible_leak(agent) else []
    console = PrintableConsole()
    columns = {name: format_metrics(values) for name, values in metrics.items()}
    table = Table("", *(Column(name, justify="right") for name in columns), box=None)
    for metric in columns["agent"]:
        table.add_row(metric, *(column[metric] for column in columns.values()))
    console.print(table)
    for message in [*warnings, *notes]:
        console.print(message)
    plot = draw(report, out / "backtest.png")
    write_page(report, out / "backtest.html", plot, notes, warnings)
    console.print(f"Plot: {out / 'backtest.png'}, report: {out / 'backtest.html'}")
