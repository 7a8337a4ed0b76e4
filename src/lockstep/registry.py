"""Registry of recipes. Their modules are imported on demand."""

import dataclasses
import difflib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

from lockstep.config import ConfigError, Recipe

RECIPES = {
    "snake-ppo": "PPO on Snake (presets features, tiny, small, base, large)",
    "gym-ppo": "PPO on any Gymnasium environment (default CartPole-v1)",
    "gym-ppo-lstm": "PPO with an LSTM on any Gymnasium environment (see --task.mask-velocity)",
    "gym-ddpg": "DDPG on any Gymnasium environment (default Pendulum-v1; preset td3)",
    "gym-sac": "SAC on any Gymnasium environment with continuous actions (default Pendulum-v1; preset mujoco)",
    "gym-tdmpc2": "TD-MPC2 on any Gymnasium environment with continuous actions (default Pendulum-v1; preset small)",
    "zoo-ppo": "PPO on PettingZoo parallel environments, one policy for all agents (preset central)",
    "sim-ppo": "PPO on any batched tensor simulator: Isaac Lab, mjlab, ManiSkill, ... (default: point masses)",
    "team-ddpg": "DDPG on team snakes, three against three (presets central, scripts)",
    "dmc-tdmpc2": "TD-MPC2 on the DeepMind control suite (default task=walker-run; preset small)",
    "trading-lstm": "PPO with an LSTM on trading: price files or a simulated market",
    "cricket-gnn": "Graph network on cricket, ball by ball (presets win, tabular)",
}
"""Help line by recipe name. The help page must not import torch."""


def recipe_module(name: str) -> str:
    """Return the module of a recipe of this package."""
    return f"lockstep.recipes.{name.replace('-', '_')}"


def find_recipe(name: str) -> type[Recipe]:
    """Return the recipe of that name, or the recipe in a Python file of the user."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in RECIPES:
        matches = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"Did you mean '{matches[0]}'?" if matches else f"Use one of {', '.join(RECIPES)}, or a .py file."
        raise ConfigError(f"there is no recipe '{name}'.", hint)
    return _only_recipe(importlib.import_module(recipe_module(name)).__dict__, name)


def _from_file(path: Path) -> type[Recipe]:
    if not path.is_file():
        raise ConfigError(f"there is no recipe file {path}.", "Use the path of a Python file with one recipe class.")
    spec = importlib.util.spec_from_file_location(f"recipe_in_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.append(directory)  # the file may import modules next to it; last, so that they shadow no library
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the help page look up the source here
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[spec.name]
        line = error.lineno if isinstance(error, SyntaxError) else _line_of(error, path)
        place = f", line {line}" if line else ""
        missing = isinstance(error, ModuleNotFoundError)
        fix = "Install the package that provides it, or fix the import." if missing else "Fix this line."
        raise ConfigError(f"recipe file {path}{place} cannot be imported: {error.msg}.", fix) from error
    recipe = _only_recipe(module.__dict__, str(path))
    recipe.name = str(path.resolve())
    return recipe


def _line_of(error: BaseException, path: Path) -> int | None:
    """Return the last line of a file that an error passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return lines[-1] if lines else None


def _only_recipe(namespace: dict[str, object], source: str) -> type[Recipe]:
    classes = [value for value in namespace.values() if isinstance(value, type)]
    recipes = [cls for cls in classes if issubclass(cls, Recipe) and cls.__module__ == namespace["__name__"]]
    if len(recipes) != 1 or not dataclasses.is_dataclass(recipes[0]):
        raise ConfigError(
            f"{source} defines {len(recipes)} recipes; it needs exactly one.",
            "Write one frozen dataclass that inherits lockstep.config.Recipe and has the fields task, algo and run.",
        )
    return recipes[0]
