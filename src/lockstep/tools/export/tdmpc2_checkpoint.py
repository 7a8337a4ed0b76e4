"""Checkpoints of the authors' TD-MPC2 code: settings that follow from their tensors, and checks against the task."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.algorithms.tdmpc2.agent import TDMPC2, TDMPC2Config
from lockstep.algorithms.tdmpc2.reference_weights import MASKS, from_reference, model_settings
from lockstep.base import Algorithm
from lockstep.config import ConfigError, Recipe

MT30_TASKS = 30
"""Number of tasks of the set mt30."""


def from_tdmpc2(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights under Lockstep's names, with the action masks if there are any, and the settings they need."""
    converted = from_reference(dict(weights))
    algo: dict[str, Any] = {"model": model_settings(converted), "episodic": "model.termination.0.weight" in converted}
    algo["seed_policy"] = "agent"  # random actions would be worse than those of a trained agent
    task: dict[str, Any] = {"pixels": True} if "model.encoder.layers.0.weight" in converted else {}
    embeddings = converted.get("model.task.weight")
    if embeddings is not None and len(embeddings) == MT30_TASKS:
        task["tasks"] = ["mt30"]
    if MASKS in weights:
        converted[MASKS] = weights[MASKS]
    return converted, {"algo": algo, "task": task}


def settings_for(
    recipe: Recipe, weights: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path
) -> Mapping[str, Any]:
    """Return the settings of a checkpoint that a recipe has. Raises ConfigError if it is not a recipe of TD-MPC2."""
    if "model.dynamics.0.weight" not in weights:
        return settings
    if not isinstance(recipe.algo, TDMPC2Config):
        raise ConfigError(
            f"{path} is a checkpoint of TD-MPC2, which {recipe.name} does not train.",
            "Use --recipe dmc-tdmpc2 task=NAME, or --recipe gym-tdmpc2 --task.id NAME.",
        )
    names = {field.name for field in dataclasses.fields(recipe.task)}
    task = {name: value for name, value in settings.get("task", {}).items() if name in names}
    return {**settings, "task": task}


def check_tdmpc2(weights: Mapping[str, Tensor], algorithm: Algorithm, path: Path) -> dict[str, Tensor]:
    """Return the weights without action masks.

    Raises:
        ConfigError: The network, the number of tasks or their actions differ from those of the algorithm.
    """
    found = {name: tensor for name, tensor in weights.items() if name != MASKS}
    if not isinstance(algorithm, TDMPC2) or "model.dynamics.0.weight" not in found:
        return found
    model = algorithm.model
    embeddings = found.get("model.task.weight")
    tasks, here = 1 if embeddings is None else len(embeddings), len(model.masks)
    if tasks != here:
        raise ConfigError(
            f"{path} is for {tasks} task{'s' * (tasks > 1)}, but the recipe has {here}.",
            "Name the tasks of the checkpoint in its order: task=ONE,TWO, or task=mt30.",
        )
    theirs, ours = model_settings(found), model_settings(algorithm.model_state_dict())
    names = {"size": "model-size"}
    if theirs != ours:
        flags = " ".join(f"{names.get(key, f'--algo.model.{key}')}={value}" for key, value in theirs.items())
        raise ConfigError(
            f"{path} has a world model of {_text(theirs)}, but that of the recipe has {_text(ours)}.",
            f"Leave out the settings of the model, which are found from the file, or use {flags}.",
        )
    masks = weights.get(MASKS)
    if masks is not None and tasks > 1 and masks.shape == model.masks.shape and not masks.eq(model.masks).all():
        row = int(masks.ne(model.masks).any(1).nonzero()[0])
        raise ConfigError(
            f"task {row + 1} of {path} has {int(masks[row].sum())} actions, but here it has "
            f"{int(model.masks[row].sum())}.",
            "Name the tasks of the checkpoint in its order: task=ONE,TWO, or task=mt30.",
        )
    _check_task(found, algorithm, tasks > 1, path)
    return found


def _check_task(weights: Mapping[str, Tensor], algorithm: TDMPC2, several: bool, path: Path) -> None:
    """Raise ConfigError if a checkpoint was trained on other observations or actions."""
    state = algorithm.model_state_dict()
    embedding = state["model.task.weight"].shape[1] if several else 0
    name = "model.encoder.0.weight" if "model.encoder.0.weight" in weights else "model.encoder.layers.0.weight"
    if name not in state:
        raise ConfigError(
            f"{path} was trained on {'images' if 'layers' in name else 'states'}, but the recipe's task has others.",
            "Use --task.pixels for a checkpoint of images, and --no-task.pixels for one of states.",
        )
    sizes = []
    for tensors in (weights, state):
        features = tensors[name].shape[1] - (embedding if "layers" not in name else 0)
        sizes.append((features, len(tensors["model.policy.2.weight"]) // 2))
    if sizes[0] != sizes[1]:
        (features, actions), (features_here, actions_here) = sizes
        raise ConfigError(
            f"{path} was trained with {features} observation and {actions} action features, but the recipe's task has "
            f"{features_here} and {actions_here}.",
            "Name the task of the checkpoint: task=NAME, or --task.id NAME.",
        )


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
