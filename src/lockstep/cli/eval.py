"""`lockstep eval RUN`: evaluate the best policy of a run in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from lockstep.cli.flag_aliases import normalize_run_args
from lockstep.cli.parser import parse_args
from lockstep.cli.torch_import import import_torch_with_status

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from lockstep.protocols import Split


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a run's best policy on full episodes, or on a split of its dataset, and print the metrics.

    A task on files is evaluated on its held-out part, unless --split says otherwise.
    """

    run: tyro.conf.Positional[Path]
    """Run directory."""
    episodes: int = 100
    """Number of episodes."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the data, for supervised runs and for tasks on files. test: the held-out part."""
    opponents: tuple[str, ...] = ()
    """Opponents of a round-robin tournament (team snakes): all, a script level, a run directory, RUN@SAMPLES, or the
    file of a submission in the platform's form (path/to/submission.py). It is executed in processes of its own."""
    games: int = 200
    """Games per pair of teams, an even number: half of them on each side."""
    submission_timeout: float = 10.0
    """Seconds that a submission may take per decision."""
    plots: Path | None = None
    """Directory for plots of the predictions or the team ratings. None: no plots."""
    checkpoint: int | None = None
    """Global samples of the checkpoint to use. None: the best, or the newest if none was evaluated."""
    seed: int = 1
    """Seed of the episodes. They differ from the run's own evaluations unless it equals run.seed."""
    device: str = "auto"
    """auto, cpu, cuda or mps. auto: CUDA if available, else MPS, else the CPU."""
    json: bool = False
    """Print one JSON object instead of a table."""


def run(arguments: Sequence[str]) -> int:
    command = parse_args(Evaluate, normalize_run_args(arguments), "lockstep eval")
    import_torch_with_status()

    if command.opponents:
        from lockstep.apps.league.table import show_standings

        show_standings(
            command.run,
            command.checkpoint,
            command.opponents,
            command.games,
            command.seed,
            command.plots,
            command.json,
            command.submission_timeout,
        )
        return 0

    import dataclasses
    import json

    from lockstep.config import ConfigError
    from lockstep.distributed import Runtime
    from lockstep.evaluation import evaluate, measure, predict
    from lockstep.inference import load
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.device import choose_device
    from lockstep.launch.kernel_compilation import show_status
    from lockstep.launch.world import WorldInfo
    from lockstep.ops.prediction_metrics import confusion_matrix
    from lockstep.protocols import TaskConfig

    device = str(choose_device(command.device, WorldInfo()))
    loaded = load(command.run, command.checkpoint, device)
    runtime = Runtime.single_process(dataclasses.replace(loaded.recipe.run, seed=command.seed), device)
    console = PrintableConsole()
    predictions = None
    task, is_env = loaded.recipe.task, isinstance(loaded.recipe.task, TaskConfig)
    if is_env and command.plots is not None:
        raise ConfigError(
            f"--plots draws predictions, but {command.run} plays episodes.", f"Use lockstep play {command.run}"
        )
    scope = f"{command.episodes} episodes" if is_env else f"the {command.split} split"
    with show_status(f"{'playing' if is_env else 'predicting'} {scope}", shown=not command.json):
        if is_env:
            scores = evaluate(loaded.policy, task, runtime, command.episodes, command.split)
        else:  # predict once, for both metrics and plots
            data = task.build(runtime.lanes, runtime.device)
            predictions = predict(loaded.policy, data, runtime, command.split)
            scores = None if predictions is None else measure(data, command.split, predictions)
    assert scores is not None  # None only after a stop request, which a single process without a launcher never gets
    data_sources, data_lines = describe_data(task, command.split)
    if command.json:
        console.print(json.dumps(scores | ({"data": data_sources} if data_sources else {})), soft_wrap=True)
    else:
        for line in (f"{command.run}: {scope}", *data_lines):
            console.print(line, soft_wrap=True)
        console.print(_table(scores) if is_env else _table_of_subsets(scores))
        if predictions is not None and data.target_type == "multiclass" and data.num_classes <= MAX_CLASSES:
            counts = confusion_matrix(predictions, data.targets(command.split))
            console.print(_confusion_table(counts, data.target_names))
    if command.plots is not None:
        for path in data.plot(command.split, predictions, command.plots):
            console.print(f"plot: {path}", soft_wrap=True)
    return 0


def describe_data(task: Any, split: "Split") -> tuple[list[dict[str, Any]], list[str]]:
    """Return what the episodes of a part use, as dicts and as lines. Empty for tasks without data."""
    if not hasattr(task, "describe_data"):
        return [], []
    sources = task.with_split(split).describe_data()
    lines = [
        f"{source['symbol']}: {source['part']}, {source['first']} to {source['last']}, {source['bars']:,} bars"
        for source in sources
    ]
    return sources, lines


MAX_CLASSES = 20
"""Largest number of classes whose confusion matrix is printed."""


def _table(scores: dict[str, float]) -> "Table":
    """Return a table with one row per metric."""
    from rich.table import Column, Table

    table = Table("measure", Column("value", justify="right"))
    for name, value in sorted(scores.items()):
        table.add_row(name.replace("_", " "), f"{value:,.0f}" if name == "episodes" else f"{value:,.3f}")
    return table


def _table_of_subsets(scores: dict[str, float]) -> "Table":
    """Return a table with a row for all data and one per subset, and a column per metric."""
    from rich.table import Column, Table

    metrics = list(dict.fromkeys(name.partition("/")[0] for name in scores if name not in ("score", "examples")))
    subsets = list(dict.fromkeys(name.partition("/")[2] for name in scores if "/" in name))
    columns = [Column(name.replace("_", " "), justify="right") for name in metrics]
    table = Table("", *columns, title=f"{scores['examples']:,.0f} examples", title_justify="left")
    for subset in ("", *subsets):
        values = [scores.get(f"{name}/{subset}" if subset else name) for name in metrics]
        table.add_row(subset or "all", *("-" if value is None else f"{value:,.4f}" for value in values))
    return table


def _confusion_table(counts: "np.ndarray", names: Sequence[str]) -> "Table":
    """Return a table of the examples of each true class (row) that are predicted as each class (column)."""
    from rich.table import Column, Table

    names = list(names) or [str(number) for number in range(len(counts))]
    columns = [Column(name, justify="right") for name in names]
    table = Table("true", *columns, title="Confusion matrix, predicted classes in columns", title_justify="left")
    for name, row in zip(names, counts.tolist(), strict=True):
        table.add_row(name, *(f"{count:,}" if count else "." for count in row))
    return table
