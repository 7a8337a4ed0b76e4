"""Worker spec: a file with the recipe and the options, so that workers do not parse the command line again.

Parsing takes 0.2 s. Four workers on two cores would spend most of their startup on it.
"""

import json
from pathlib import Path
from typing import Any

from lockstep.cli.options import resolve
from lockstep.config import Recipe, apply_overrides, as_dict

WORKER = "--worker"
"""Internal first argument of `train` in a worker. The path of its spec follows."""


def write_spec(path: Path, recipe: Recipe, **options: Any) -> list[str]:
    """Write a recipe and the options of `train()`. Return the command line of a worker."""
    spec = {"recipe": recipe.name, "settings": as_dict(recipe), "options": options}
    path.write_text(json.dumps(spec), encoding="utf-8")
    return ["train", WORKER, str(path)]


def run_spec(path: Path) -> int:
    """Train the recipe of a spec as a worker. Return the exit code."""
    from lockstep.cli.workers import run_training_worker
    from lockstep.launch.world import WorldInfo
    from lockstep.registry import find_recipe
    from lockstep.training_loop import train

    spec = json.loads(path.read_text(encoding="utf-8"))
    recipe = apply_overrides(find_recipe(spec["recipe"])(), spec["settings"])
    if recipe.run.lanes is None:  # several hosts: the launcher did not know their number of processes
        recipe = resolve(recipe, WorldInfo.from_environment().size)
    options = spec["options"]
    return run_training_worker(lambda: train(recipe, **options), options.get("stop_at"))
