"""`lockstep eval RUN`: score the best policy of a run; needs no launcher."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from lockstep.cli.torch_import import import_torch_with_status

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Evaluate:
    """Play whole episodes with a run's best policy, or predict a split of its data, and print what that came to."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    episodes: int = 100
    """How many episodes to play."""
    split: Literal["train", "validation", "test"] = "test"
    """Which part of a data set to predict, where the run learns from one."""
    opponents: tuple[str, ...] = ()
    """Play a team against these, and each against each: all, a level, a run directory, or RUN@SAMPLES of one."""
    games: int = 200
    """Games of each pair of teams, half of them on each side."""
    plots: Path | None = None
    """Also draw the predictions, or the ladder of teams, into this directory."""
    checkpoint: int | None = None
    """Use the checkpoint at this many samples instead of the best."""
    seed: int = 1
    """Seed of the episodes; other than the run's own evaluations unless it happens to be the run's seed."""
    device: str = "auto"
    """auto, cpu, cuda or mps. auto: CUDA where there is a GPU, else MPS on a Mac, else the CPU."""
    json: bool = False
    """Print one json object instead of a table."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(Evaluate, args=list(arguments), prog="lockstep eval")
    import_torch_with_status()

    if command.opponents:
        from lockstep.apps.league.table import show_standings

        show_standings(
            command.run, command.checkpoint, command.opponents, command.games, command.seed, command.plots, command.json
        )
        return 0

    import dataclasses
    import json
    from contextlib import nullcontext

    from lockstep.config import ConfigError
    from lockstep.distributed import Runtime
    from lockstep.evaluate import evaluate, measure, predict
    from lockstep.inference import load
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.device import choose_device
    from lockstep.launch.world import WorldInfo
    from lockstep.protocols import TaskConfig

    device = str(choose_device(command.device, WorldInfo()))
    loaded = load(command.run, command.checkpoint, device)
    runtime = Runtime.single_process(dataclasses.replace(loaded.recipe.run, seed=command.seed), device)
    console = PrintableConsole()
    task, played = loaded.recipe.task, isinstance(loaded.recipe.task, TaskConfig)
    if played and command.plots is not None:
        raise ConfigError(f"{command.run} plays, and pictures are of predictions.", f"Use lockstep play {command.run}")
    work = f"{command.episodes} episodes" if played else f"the {command.split} split"
    with console.status(f"{'playing' if played else 'predicting'} {work}") if not command.json else nullcontext():
        if played:
            scores = evaluate(loaded.policy, task, runtime, command.episodes)
        else:  # predicted once, for the measures and for the pictures
            data = task.build(runtime.lanes, runtime.device)
            predictions = predict(loaded.policy, data, runtime, command.split)
            scores = None if predictions is None else measure(data, command.split, predictions)
    assert scores is not None  # nobody asks this runtime to stop
    if command.json:
        console.print(json.dumps(scores), soft_wrap=True)
    else:
        console.print(f"{command.run}: {work}", soft_wrap=True)
        console.print(_table(scores) if played else _table_of_parts(scores))
    if command.plots is not None:
        for path in data.plot(command.split, predictions, command.plots):
            console.print(f"drawn: {path}", soft_wrap=True)
    return 0


def _table(scores: dict[str, float]) -> "Table":
    """A row for each measure."""
    from rich.table import Table

    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in sorted(scores.items()):
        table.add_row(name.replace("_", " "), f"{value:,.3f}")
    return table


def _table_of_parts(scores: dict[str, float]) -> "Table":
    """A row for the whole and one for each part, a column for each measure."""
    from rich.table import Table

    from lockstep.ops.prediction_metrics import overall_metrics

    measures = list(overall_metrics(scores))
    parts = list(dict.fromkeys(name.partition("/")[2] for name in scores if "/" in name))
    table = Table(title=f"{scores['examples']:,.0f} examples", title_justify="left")
    table.add_column("")
    for name in measures:
        table.add_column(name.replace("_", " "), justify="right")
    for part in ("", *parts):
        values = [scores.get(f"{name}/{part}" if part else name) for name in measures]
        table.add_row(part or "all", *("-" if value is None else f"{value:,.4f}" for value in values))
    return table
