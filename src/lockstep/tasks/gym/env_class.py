"""Environments by their class: `module:Class`, `my_env.py:Class`, or a class given from Python.

Only subclasses of Gymnasium's environments are accepted. The config of a run may come from an untrusted source, and
could otherwise call any function with arguments of its choice.
"""

import importlib
import inspect
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from lockstep.config import ConfigError
from lockstep.tasks.gym.env_file import env_file, load_env_file

FAMILIES = {"ALE/": "ale_py", "MinAtar/": "minatar.gym", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
"""Module that registers environments with Gymnasium, by the start of their ids. Most do so when they are imported."""


def find_env(id: str) -> str | EnvSpec:
    """Import what an id names. Return a registered id, or the specification of an environment class."""
    _import_family(id)
    module_name, _, name = id.rpartition(":")
    if not module_name:
        return id
    file = env_file(id)
    module = importlib.import_module(module_name) if file is None else load_env_file(file)
    if name in gymnasium.registry:
        return name
    try:
        found: Any = attrgetter(name)(module)
    except AttributeError:
        return name  # Gymnasium raises an error that lists similar names
    bases = inspect.getmro(found) if isinstance(found, type) else ()
    if VectorEnv in bases:  # first: EnvPool's classes inherit both
        return EnvSpec(name, vector_entry_point=found)
    if gymnasium.Env in bases:
        return EnvSpec(name, entry_point=found)
    raise ConfigError(
        f"{id} is neither a registered environment nor a class of environments.",
        "Name a subclass of gymnasium.Env or gymnasium.vector.VectorEnv, or register a function: "
        "gymnasium.register(ID, entry_point=FUNCTION) or gymnasium.register(ID, vector_entry_point=FUNCTION).",
    )


def _import_family(id: str) -> None:
    """Import the package of an id that needs no prefix."""
    name = next((module for start, module in FAMILIES.items() if id.startswith(start)), None)
    if name is None:
        return
    module = importlib.import_module(name)
    if name == "ale_py":
        module.ALEInterface.setLoggerMode(module.LoggerMode.Error)  # no banner on standard error per environment
    if name == "minatar.gym" and "MinAtar/Breakout-v1" not in gymnasium.registry:
        module.register_envs()


def class_id(cls: type[Any]) -> str:
    """Return the id by which other processes and later commands find a class: its file or its module, and its name."""
    name, module = cls.__qualname__, cls.__module__
    if "<locals>" in name:
        raise ConfigError(f"{name} is defined inside a function.", "Define it at the top level of a Python file.")
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file is None:
        raise ConfigError(
            f"{name} is defined in an interactive session, from which other processes cannot import it.",
            "Define it in a Python file and import it.",
        )
    # A module next to a script is on the path of the script only, so name its file.
    if file is not None and (module == "__main__" or Path(file).stem == module):
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"
