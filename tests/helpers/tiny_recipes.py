"""The smallest run: Snake on a 4x4 board, 128 samples and two updates per iteration."""

from pathlib import Path

from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find, lineage
from lockstep.config import Recipe, apply_overrides
from lockstep.registry import find_recipe

ITERATION = 128
"""Samples per iteration."""

SETTINGS = {
    "task": {"size": 4, "num_envs": 16},
    "algo": {
        "rollout_steps": 8,
        "batch_size": 64,
        "epochs": 1,
        "encoder": {"hidden_sizes": 4, "num_layers": 1, "out_features": 8},
    },
    "run": {
        "total_samples": 4 * ITERATION,
        "log_every": ITERATION,
        "save_every": ITERATION,
        "eval_every": None,
        "keep_last": 100,
    },
    "run.record_video": False,
}


def tiny(directory: Path, name: str = "run", **settings: object) -> Recipe:
    """Return a recipe for a run of a few iterations; `settings` override the run's settings."""
    recipe = apply_overrides(find_recipe("snake-ppo")(), SETTINGS)
    return apply_overrides(recipe, {"run": {"runs_dir": str(directory), "name": name, "device": "cpu", **settings}})


def checkpoints_of(run: Path) -> list[int]:
    """Return the samples of the checkpoints in the run's lineage."""
    return sorted(name.samples for name in lineage(run / "checkpoints"))


def hash_of(run: Path, at: int | None = None) -> str:
    """Return the hash of a run's newest checkpoint, or of the one at `at` samples."""
    return hash_checkpoint(run / "checkpoints" / str(find(run / "checkpoints", at)[0]))
