"""`lockstep eval RUN`: score the best policy of a run; needs no launcher."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Evaluate:
    """Play whole episodes with a run's best policy and print what they came to."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    episodes: int = 100
    """How many episodes to play."""
    at: int | None = None
    """Use the checkpoint at this many samples instead of the best."""
    seed: int = 1
    """Seed of the episodes; other than the run's own evaluations unless it happens to be the run's seed."""
    device: str = "cpu"
    """Where to run the policy."""
    json: bool = False
    """Print one json object instead of a table."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(Evaluate, args=list(arguments), prog="lockstep eval")

    import dataclasses
    import json
    from contextlib import nullcontext

    from rich.console import Console
    from rich.table import Table

    from lockstep.evaluate import evaluate
    from lockstep.loading import load
    from lockstep.runtime import Runtime

    loaded = load(command.run, command.at, command.device)
    runtime = Runtime.alone(dataclasses.replace(loaded.recipe.run, seed=command.seed), command.device)
    console = Console()
    with console.status(f"playing {command.episodes} episodes") if not command.json else nullcontext():
        scores = evaluate(loaded.policy, loaded.recipe.task, runtime, command.episodes)
    assert scores is not None  # nobody asks this runtime to stop
    if command.json:
        console.print(json.dumps(scores), soft_wrap=True, highlight=False)
        return 0
    console.print(f"{command.run}: {command.episodes} episodes", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in sorted(scores.items()):
        table.add_row(name.replace("_", " "), f"{value:,.3f}")
    console.print(table)
    return 0
