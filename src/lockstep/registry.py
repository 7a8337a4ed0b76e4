"""Registry of recipes: their names and modules, imported only when asked for."""

import dataclasses
import difflib
import importlib
import importlib.util
import sys
from pathlib import Path

from lockstep.config import ConfigError, Recipe

RECIPES = {
    "snake-ppo": ("lockstep.recipes.snake_ppo", "PPO learns Snake from the board (presets tiny, small, base, large)"),
    "gym-ppo": ("lockstep.recipes.gym_ppo", "PPO on any Gymnasium task (CartPole-v1 unless told otherwise)"),
    "gym-ppo-lstm": ("lockstep.recipes.gym_ppo_lstm", "PPO with memory on any Gymnasium task (--task.mask-velocity)"),
    "gym-ddpg": ("lockstep.recipes.gym_ddpg", "DDPG on any Gymnasium task (Pendulum-v1 unless told; preset td3)"),
    "team-ddpg": ("lockstep.recipes.team_ddpg", "DDPG for a team of three snakes against three (preset central)"),
    "dmc-tdmpc2": (
        "lockstep.recipes.dmc_tdmpc2",
        "TD-MPC2 on the control suite (task=walker-run; preset small)",
    ),
    "trading-lstm": ("lockstep.recipes.trading_lstm", "PPO with memory trades files of prices, or a computed market"),
    "cricket-gnn": (
        "lockstep.recipes.cricket_gnn",
        "a graph network on cricket, ball by ball (presets win, tabular)",
    ),
}
"""Name, module, and one line for the help page, which must not import torch."""


def find_recipe(name: str) -> type[Recipe]:
    """The recipe of that name, or the one in a Python file of the user's."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"There are: {', '.join(RECIPES)}; or give a .py file."
        raise ConfigError(f"there is no recipe '{name}'.", hint)
    return _only_recipe(importlib.import_module(RECIPES[name][0]).__dict__, name)


def _from_file(path: Path) -> type[Recipe]:
    if not path.is_file():
        raise ConfigError(f"there is no recipe file {path}.", "Give the path of a Python file with one recipe class.")
    spec = importlib.util.spec_from_file_location(f"recipe_in_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    beside = str(path.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)  # the file may import others next to it; last, so that they replace no library
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, and the help page, look for their source here
    spec.loader.exec_module(module)
    recipe = _only_recipe(module.__dict__, str(path))
    recipe.name = str(path.resolve())
    return recipe


def _only_recipe(names: dict[str, object], where: str) -> type[Recipe]:
    here = names["__name__"]
    found = [
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, Recipe) and value.__module__ == here
    ]
    if len(found) != 1 or not dataclasses.is_dataclass(found[0]):
        raise ConfigError(
            f"{where} defines {len(found)} recipes; it needs exactly one.",
            "Write one frozen dataclass that inherits lockstep.config.Recipe and has the fields task, algo and run.",
        )
    return found[0]
