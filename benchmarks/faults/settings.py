"""Settings of the run of each recipe: short iterations, and a checkpoint after each."""

from lockstep.config import with_preset
from lockstep.registry import find_recipe

SAVES = 40
"""Checkpoints of one run. If it ends before all faults were injected, another one begins."""


def run_settings(recipe: str) -> list[str]:
    """Return the arguments of `lockstep train` for the run of a recipe, without its place."""
    smoke = with_preset(find_recipe(recipe)(), None, smoke=True)
    save_every = smoke.algo.samples_per_iteration(smoke.task)
    run = {"total_samples": SAVES * save_every, "save_every": save_every, "keep_last": 4, "collective_timeout": 20}
    run |= {"eval_every": 8 * save_every, "log_every": 4 * save_every, "reduction": "exact"}
    return [recipe, "--smoke", *(f"run.{name}={value}" for name, value in run.items())]
