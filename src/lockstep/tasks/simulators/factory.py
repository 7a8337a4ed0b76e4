"""The function of the user that makes a simulator: `my_sim.py:make_env` or `package.module:function`.

Only a function with a parameter `num_envs` is called. The config of a run may come from an untrusted source, and could
otherwise call any function with arguments of its choice.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from lockstep.config import ConfigError
from lockstep.tasks.gym.env_file import env_file, load_env_file

Factory = Callable[[int, torch.device, int], Any]
"""Makes a simulator from a number of environments, a device and a seed."""


def find_factory(make: str, env_kwargs: Mapping[str, Any]) -> Factory:
    """Import the function that `task.make` names, and bind its arguments."""
    function = _import(make)
    parameters = inspect.signature(function).parameters
    if "num_envs" not in parameters:
        raise ConfigError(
            f"task.make is {make}, which has no parameter num_envs.",
            "Name a function that makes a simulator: def make_env(num_envs, device, seed).",
        )
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    reserved = sorted({"num_envs", "device", "seed"} & env_kwargs.keys())
    unknown = sorted(env_kwargs.keys() - parameters.keys())
    if reserved or (unknown and not takes_all):
        raise ConfigError(
            f"task.env_kwargs has {', '.join(reserved or unknown)}, which "
            + ("Lockstep sets itself." if reserved else f"{make} does not take."),
            "Use --task.num-envs, --run.device and --run.seed." if reserved else f"It takes {', '.join(parameters)}.",
        )

    def call(num_envs: int, device: torch.device, seed: int) -> Any:
        offered = {"num_envs": num_envs, "device": str(device), "seed": seed}
        given = {name: value for name, value in offered.items() if takes_all or name in parameters}
        return function(**given, **env_kwargs)

    return call


def _import(make: str) -> Callable[..., Any]:
    module_name, _, name = make.rpartition(":")
    file = env_file(make)
    if not module_name or (file is not None and not file.is_file()):
        raise ConfigError(
            f"task.make is {make}, which does not name a function{f': there is no file {file}' if file else ''}.",
            "Use my_sim.py:make_env, or package.module:function.",
        )
    try:
        module = importlib.import_module(module_name) if file is None else load_env_file(file)
        function = attrgetter(name)(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"task.make is {make}, but the module {error.name} is not installed.", "Install it, or fix the name."
        ) from error
    except AttributeError as error:
        raise ConfigError(f"task.make is {make}, but {module_name} has no {name}.", "Fix the name.") from error
    if not callable(function):
        raise ConfigError(f"task.make is {make}, which is not a function.", "Name a function that makes a simulator.")
    return function
