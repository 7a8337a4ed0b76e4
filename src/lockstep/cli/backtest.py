"""`lockstep backtest RECIPE --data FILE`: walk-forward backtest on price files, or backtest of a run."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve
from lockstep.config import ConfigError, Recipe

if TYPE_CHECKING:
    from lockstep.apps.backtest.results import BacktestReport


@dataclass(frozen=True, kw_only=True)
class Backtest(RecipeOptions):
    """Train new agents for each fold on the bars before it, trade the fold, and join the folds into one equity curve.

    Accepts settings of the recipe, as `train` does. Repeat the command to resume a backtest that was interrupted.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE|RUN")]
    """Recipe with the trading task, such as trading-lstm. Or a run directory: its best policy trades the test part."""
    folds: int = 4
    """Number of consecutive test folds."""
    train_fraction: float = 0.5
    """Fraction of the bars before the first fold."""
    window: Literal["expanding", "rolling"] = "expanding"
    """Bars that later agents train on. expanding: all bars before their fold. rolling: as many as the first agent."""
    seeds: int = 1
    """Number of agents per fold, with seeds from run.seed on. Each trades the same fraction of the capital."""
    weights: tuple[float, ...] = ()
    """Fraction of the capital for each file of a portfolio, at the start. Empty: equal fractions."""
    trials: int | None = None
    """Number of strategies tried so far, this one included, for the deflated Sharpe ratio. None: the number of
    seeds."""
    procs: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Processes that train each agent."""
    out: Path = Path("backtest")
    """Output directory: a run per seed and fold, backtest.html, backtest.png, backtest.json, equity.csv and
    trades.csv."""
    json: bool = False
    """Print backtest.json instead of tables. Progress is printed to standard error."""


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(Backtest, arguments, "backtest")
    numbers = command.folds, command.seeds, command.procs, command.trials or 1
    if min(numbers) < 1 or not 0 < command.train_fraction < 1:
        raise ConfigError(
            f"--folds is {command.folds}, --seeds {command.seeds}, --procs {command.procs}, --trials {command.trials} "
            f"and --train-fraction {command.train_fraction}.",
            "Use at least 1 of each, and a fraction between 0 and 1.",
        )
    with _stdout_to_stderr() if command.json else nullcontext():
        report = _backtest_run(command, rest) if _is_run(command.recipe) else _walk_forward(command, rest)
    if report is None:
        from lockstep.launch.world import EXIT_PREEMPTED, warn_user

        warn_user("The backtest was stopped. Repeat the command to resume it.")
        return EXIT_PREEMPTED
    _present(report, command.out, command.json)
    return 0


def _is_run(name: str) -> bool:
    from lockstep.io.jsonl import CONFIG

    return (Path(name) / CONFIG).is_file()


def _walk_forward(command: Backtest, rest: list[str]) -> "BacktestReport | None":
    recipe = resolve(parse_recipe(command, rest, f"lockstep backtest {command.recipe}"), command.procs)

    from lockstep.apps.backtest.walk_forward import WalkForward, walk_forward

    _require_trading(recipe, command.recipe)
    settings = WalkForward(
        command.folds, command.train_fraction, command.window, command.seeds, command.weights, command.trials
    )
    out = command.out.absolute()  # a resumed run is found from any directory
    return walk_forward(recipe, out, settings, lambda fold, resume: _train(fold, resume, command.procs))


def _backtest_run(command: Backtest, rest: list[str]) -> "BacktestReport":
    from lockstep.apps.backtest.walk_forward import backtest_run
    from lockstep.inference import load_recipe

    run = Path(command.recipe)
    _require_trading(load_recipe(run), command.recipe)
    data = [word for word in rest if word != "--data"]
    if rest[:1] != ["--data"] and rest:
        raise ConfigError(
            f"{rest[0]} cannot be set for a backtest of a run.", "Use --data FILE, or name a recipe instead of a run."
        )
    command.out.mkdir(parents=True, exist_ok=True)
    return backtest_run(run, data, command.weights, command.trials or 1)


def _require_trading(recipe: Recipe, name: str) -> None:
    from lockstep.tasks.trading.env import TradingConfig

    if not isinstance(recipe.task, TradingConfig):
        raise ConfigError(
            f"{name} does not have the trading task.", "Use trading-lstm, or a recipe with the trading task."
        )


def _train(recipe: Recipe, resume: bool, procs: int) -> bool:
    """Train or resume the run of a fold. Return whether it has finished; False after a stop request."""
    if procs == 1:
        from lockstep.training_loop import train

        return not train(recipe, resume=resume).preempted

    from lockstep.cli.worker_spec import write_spec
    from lockstep.cli.workers import launch_and_report
    from lockstep.io.jsonl import read_status
    from lockstep.io.temporary_directory import temporary_directory
    from lockstep.launch.device import require_gpus
    from lockstep.launch.rendezvous import LaunchConfig
    from lockstep.run_reservation import reserved, run_path

    require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    config = LaunchConfig(procs, max_restarts=3)
    with temporary_directory("backtest") as directory:
        spec = directory / "spec.json"
        if resume:
            code = launch_and_report(write_spec(spec, recipe, resume=True), config)
        else:
            with reserved(recipe) as (_, named, job):
                code = launch_and_report(write_spec(spec, named), replace(config, job=job))
    if code and read_status(run_path(recipe)).get("state") != "preempted":
        raise ConfigError(f"training of {run_path(recipe)} failed with code {code}.", "See the error above.")
    return code == 0


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what this process and its children print to standard error, so that standard output is JSON only."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _present(report: "BacktestReport", out: Path, as_json: bool) -> None:
    """Write the files and print the tables."""
    from rich.table import Column, Table

    from lockstep.apps.backtest.files import write_files
    from lockstep.apps.backtest.plots import draw, write_page
    from lockstep.apps.backtest.tables import FOLD_HEADS, FORMATS, describe, fold_rows, metric_columns
    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole()
    paths = write_files(report, out)
    write_page(report, out / "backtest.html", draw(report, out / "backtest.png"))
    if as_json:
        console.print((out / "backtest.json").read_text(encoding="utf-8"), soft_wrap=True)
        return
    columns = metric_columns(report)
    table = Table("", *(Column(name, justify="right") for name in columns), box=None)
    for index, (label, _) in enumerate(FORMATS.values()):
        table.add_row(label, *(column[index] for column in columns.values()))
    console.print(table)
    heads = (Column(name, justify="right", no_wrap=True) for name in FOLD_HEADS)
    folds = Table(*heads, box=None, collapse_padding=True, pad_edge=False)  # 80 columns
    for row in fold_rows(report):
        folds.add_row(*row)
    console.print(folds)
    for line in [*report.warnings(), *describe(report)]:
        console.print(line)
    names = [out / "backtest.html", out / "backtest.png", *paths]
    console.print(f"Report: {', '.join(str(path) for path in names)}", soft_wrap=True)
