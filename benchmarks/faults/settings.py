"""Settings of the run of each recipe: short iterations, and a checkpoint about once a second."""

from lockstep.config import apply_overrides, with_preset
from lockstep.registry import find_recipe

SAVES = 40
"""Checkpoints of one run. If it ends before all faults were injected, another one begins."""
ITERATIONS_PER_SAVE = 1
_OF_RECIPES: dict[str, tuple[str, ...]] = {}
"""Settings in addition to `--smoke`."""
RECIPES = (
    *("gym-ppo", "gym-ppo-lstm", "gym-ddpg", "gym-sac", "gym-tdmpc2", "dmc-tdmpc2"),
    *("snake-ppo", "team-ddpg", "trading-lstm", "cricket-gnn", "zoo-ppo", "sim-ppo"),
)


def run_settings(recipe: str) -> list[str]:
    """Return the arguments of `lockstep train` for the run of a recipe, without its place."""
    settings = _OF_RECIPES.get(recipe, ())
    overrides = dict(setting.split("=", 1) for setting in settings)
    built = apply_overrides(with_preset(find_recipe(recipe)(), None, smoke=True), overrides)
    save_every = ITERATIONS_PER_SAVE * built.algo.samples_per_iteration(built.task)
    run = {"total_samples": SAVES * save_every, "save_every": save_every, "keep_last": 4, "collective_timeout": 20}
    run |= {"eval_every": 8 * save_every, "log_every": 4 * save_every, "reduction": "exact"}
    return [recipe, "--smoke", *settings, *(f"run.{name}={value}" for name, value in run.items())]
