"""What a launcher hands to its workers: the resolved recipe and how to start it, so that no worker parses flags again.

Parsing a command line takes a fifth of a second. Four workers that share two cores would spend most of their start on
it.
"""

import json
from pathlib import Path
from typing import Any

from lockstep.config import Recipe, apply_overrides, as_dict

WORKER = "--worker"
"""First argument of `train` in a worker, before the path of its spec. It is not a flag for users."""


def write_spec(path: Path, recipe: Recipe, **options: Any) -> list[str]:
    """Write a recipe and the options of `train()`. Returns the arguments with which a worker runs them."""
    spec = {"recipe": recipe.name, "settings": as_dict(recipe), "options": options}
    path.write_text(json.dumps(spec), encoding="utf-8")
    return ["train", WORKER, str(path)]


def run_spec(path: Path) -> int:
    """Train what a launcher has written, as one of its workers. Returns the exit code."""
    from lockstep.cli.workers import run_training_worker
    from lockstep.registry import find_recipe
    from lockstep.train import train

    spec = json.loads(path.read_text(encoding="utf-8"))
    recipe = apply_overrides(find_recipe(spec["recipe"])(), spec["settings"])
    return run_training_worker(lambda: train(recipe, **spec["options"]))
