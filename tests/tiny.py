"""The smallest run there is: Snake on a board of four by four, 128 samples and two updates an iteration."""

from pathlib import Path

from lockstep.config import Recipe, overlay
from lockstep.recipes import find_recipe
from lockstep.run.format import hash_checkpoint
from lockstep.run.lineage import find, lineage

ITERATION = 128
"""Samples of one iteration."""

SETTINGS = {
    "task": {"size": 4, "num_envs": 16},
    "algo": {"horizon": 8, "batch_size": 64, "epochs": 1, "encoder": {"width": 4, "depth": 1, "features": 8}},
    "run": {"samples": 4 * ITERATION, "log_every": ITERATION, "save_every": ITERATION, "eval_every": None, "keep": 100},
    "run.gif": False,
}


def tiny(directory: Path, name: str = "run", **settings: object) -> Recipe:
    """A recipe for a run of a few iterations; `settings` are those of the run."""
    recipe = overlay(find_recipe("snake-ppo")(), SETTINGS)
    return overlay(recipe, {"run": {"dir": str(directory), "name": name, "device": "cpu", **settings}})


def checkpoints_of(run: Path) -> list[int]:
    """The samples at which the run, as it is now, has checkpoints."""
    return sorted(name.samples for name in lineage(run / "checkpoints"))


def hash_of(run: Path, at: int | None = None) -> str:
    """The hash of a run's newest checkpoint, or of the one at so many samples."""
    return hash_checkpoint(run / "checkpoints" / str(find(run / "checkpoints", at)[0]))
