"""Games by their id: `package.module` with a `parallel_env`, `package.module:Name`, or `my_game.py:Name`.

Only PettingZoo's `parallel_env` functions and subclasses of `ParallelEnv` are accepted. The config of a run may come
from an untrusted source, and could otherwise call any function with arguments of its choice.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from lockstep.config import ConfigError
from lockstep.tasks.gym.env_file import env_file, load_env_file
from lockstep.tasks.gym.packages import install_hint
from lockstep.tasks.rendering.opengl import prepare_sdl

PARALLEL_ENV = "parallel_env"
"""Name of the function of a PettingZoo module that makes a parallel environment."""


def full_id(id: str) -> str:
    """Return an id with the name of the function or class: `parallel_env` if it has none."""
    return id if ":" in id else f"{id}:{PARALLEL_ENV}"


def make_game(id: str, kwargs: Mapping[str, Any]) -> Any:
    """Make a parallel environment."""
    prepare_sdl()  # pygame is initialized when a game is made
    try:
        return _find(full_id(id))(**kwargs)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{id} needs a package that is not installed.", install_hint(error, id)) from error
    except TypeError as error:
        raise ConfigError(f"{id} cannot be made: {error}.", "Fix --task.env-kwargs.") from error


def make_renderable_game(id: str, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any], list[str]]:
    """Make a game that can render images, or text. Return it with its keyword arguments and its render modes."""
    game, options = make_game(id, kwargs), dict(kwargs)
    modes = game.metadata.get("render_modes") or []
    mode = next((mode for mode in ("rgb_array", "ansi") if mode in modes), None)
    if mode is None or "render_mode" in options:
        return game, options, [options["render_mode"]] if "render_mode" in options else []
    try:
        renderable = make_game(id, options | {"render_mode": mode})
    except ConfigError:  # its constructor has no such argument
        return game, options, []
    game.close()
    return renderable, options | {"render_mode": mode}, [mode]


@cache
def count_agents(id: str, kwargs: tuple[tuple[str, Any], ...]) -> int:
    """Return the number of agents that a game may have."""
    game = make_game(id, dict(kwargs))
    try:
        return len(possible_agents(id, game))
    finally:
        game.close()


def possible_agents(id: str, game: Any) -> list[Any]:
    """Return all agents that may appear in a game."""
    agents = list(getattr(game, "possible_agents", ()))
    if not agents:
        raise ConfigError(
            f"{id} has no possible_agents, so the number of its agents is not known.",
            "Set possible_agents in the constructor of the environment.",
        )
    return agents


def _find(id: str) -> Callable[..., Any]:
    module_name, _, name = id.rpartition(":")
    file = env_file(id)
    module = importlib.import_module(module_name) if file is None else load_env_file(file)
    try:
        found: Any = attrgetter(name)(module)
    except AttributeError:
        raise ConfigError(
            f"{module_name} has no {name}.",
            "Name a module of parallel environments such as mpe2.simple_spread_v3, or its class: --task.id MODULE:NAME",
        ) from None
    base = importlib.import_module("pettingzoo").ParallelEnv
    if (isinstance(found, type) and base in inspect.getmro(found)) or (name == PARALLEL_ENV and callable(found)):
        return found
    raise ConfigError(
        f"{id} is neither a parallel_env function nor a class of parallel environments.",
        "Name a subclass of pettingzoo.ParallelEnv, or a function with the name parallel_env.",
    )
