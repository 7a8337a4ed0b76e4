"""Bringing a model in: weights of other programs become a run, to be played, scored, gone on with or begun from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.config import ConfigError, Recipe
from lockstep.export.acting import portable
from lockstep.export.formats import compare, put_weights
from lockstep.export.sb3 import from_sb3, read_sb3, settings_of
from lockstep.export.tensors import read_tensors
from lockstep.loading import load_agent
from lockstep.protocols import Clock
from lockstep.run.rundir import RunDir
from lockstep.runtime import Runtime

_WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before every name."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The weights in a file under our names as far as they are known, settings that go with them, and a recipe's name.

    Settings and name are empty where the file does not say them.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.", "Give a .zip of Stable-Baselines3, a .safetensors, or a .pt.")
    if path.suffix == ".zip":
        data, parameters = read_sb3(path)
        return from_sb3(parameters, path), settings_of(data, parameters), ""
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return unwrapped(read_tensors(path)), {}, ""
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{path} holds no weights that can be read: {error}.", "Give a state dict.") from None


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    with safe_open(str(path), framework="pt") as file:
        about = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    settings = json.loads(about.get("config", "{}"))
    settings = {key: value for key, value in settings.items() if key in ("task", "algo")}
    name = about.get("recipe", "")
    return unwrapped(weights), settings, "" if name.endswith(".py") else name  # a stranger's file names no code


def unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what wrappers put before their names."""
    names = dict(weights)
    for prefix in _WRAPPERS * 2:  # either may be inside the other
        if names and all(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    return names


def bring_in(weights: Mapping[str, Tensor], recipe: Recipe, path: Path) -> Path:
    """Make a run of a recipe whose agent has these weights, at 0 samples, and read it back; where it is."""
    runtime = Runtime.alone(recipe.run)
    task: Any = recipe.task.build(runtime.lanes, runtime.device)
    try:
        algorithm = recipe.algo.build(task, runtime)
        put_weights(algorithm, fitted(weights, algorithm.weights(), path))
        clock = Clock(budget=recipe.run.samples)
        with RunDir.open(recipe, runtime, False) as run:
            run.checkpoints.restore(algorithm, task, clock)  # there is none: this claims the run
            run.finish(algorithm, task, clock, preempted=True)
    finally:
        task.close()
    compare(portable(algorithm), portable(load_agent(run.path, recipe)).decide, recipe, tolerance=0.0)
    return Path(run.path)


def fitted(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Weights under the names that an agent has; ConfigError naming what is missing, too much or of another shape."""
    if not set(weights) & set(wanted):
        weights = {f"net.{name}": tensor for name, tensor in weights.items()}
    missing, extra = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    other = [
        f"{name} is {tuple(weights[name].shape)} and not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in weights and weights[name].shape != wanted[name].shape
    ]
    if missing or extra or other:
        parts = [
            f"it lacks {', '.join(missing[:3])}" if missing else "",
            f"it has {', '.join(extra[:3])}" if extra else "",
            *other[:3],
        ]
        raise ConfigError(
            f"{path} does not fit the recipe's network: {'; '.join(filter(None, parts))}.",
            "Give the recipe the task and the network it was made with: --task.id, --algo.encoder.width, ...",
        )
    return {name: weights[name].to(tensor.dtype) for name, tensor in wanted.items()}
