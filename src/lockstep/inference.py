"""Load a trained policy in plain Python: no launcher, no process group."""

import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base import Algorithm
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import best_checkpoint, find
from lockstep.checkpoint.naming import CheckpointName
from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS, CONFIG
from lockstep.protocols import Policy
from lockstep.pytree import Tree, first_leaf, tree_map, tree_where
from lockstep.run_dir import read_config


class LoadedPolicy:
    """Policy with recurrent state. Call `act` on observations and `reset` where an episode ended.

    `recipe` is the recipe of the run, with the settings that it was started with.
    """

    def __init__(self, policy: Policy, recipe: Recipe, device: torch.device) -> None:
        self.policy, self.recipe, self.device = policy, recipe, device
        self._memory: Tree | None = None

    def act(self, obs: Any) -> np.ndarray:
        """Return actions for a batch of observations, without exploration.

        Args:
            obs: Observations [N, ...]: an array, a tensor, or a dict of them. N must be the same until `reset`.

        Returns:
            Actions [N, ...] as a NumPy array.
        """
        batch = tree_map(lambda x: _as_tensor(x, self.device), obs)
        if self._memory is None:
            self._memory = self.policy.initial_state(len(first_leaf(batch)))
        action, self._memory = self.policy.act(batch, self._memory)
        return action.cpu().numpy()

    def reset(self, mask: Any = None) -> None:
        """Reset the recurrent state. A policy without a recurrent layer ignores it.

        Args:
            mask: [N] bool, true in the rows whose episode ended. None: all rows.
        """
        if mask is None or self._memory is None or self._memory == {}:
            self._memory = None
            return
        rows = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
        initial_memory = self.policy.initial_state(len(rows))
        self._memory = tree_where(rows, initial_memory, self._memory)


def load(run: str | Path, at: int | None = None, device: str = "cpu", recipe: Recipe | None = None) -> LoadedPolicy:
    """Load a policy of a run. It needs no launcher and no process group.

    Args:
        run: Path of the run directory.
        at: Samples of the checkpoint to load. None: the best checkpoint, or the newest if none was evaluated.
        device: Device of the policy.
        recipe: Recipe of the run. None: read it from the run directory.

    Returns:
        A policy with the methods `act` and `reset`.

    Raises:
        ConfigError: The directory contains no run or no such checkpoint.
    """
    recipe = recipe or load_recipe(Path(run))
    return LoadedPolicy(load_algorithm(Path(run), recipe, at, device).policy(), recipe, torch.device(device))


def load_recipe(run: Path) -> Recipe:
    """Load the recipe of a run directory, with the settings it was started with."""
    from lockstep.registry import find_recipe

    name, values = read_config(run)
    if name.endswith(".py"):
        _refuse_code_of_run(run, Path(name), "recipe")
    recipe = apply_overrides(find_recipe(name)(), values)
    if (file := getattr(recipe.task, "code_file", None)) is not None:
        _refuse_code_of_run(run, file, "environment")
    return recipe


def _refuse_code_of_run(run: Path, file: Path, what: str) -> None:
    """Reject a Python file inside the run directory: one from an untrusted source must not execute its own code."""
    if file.resolve().is_relative_to(run.resolve()):
        raise ConfigError(
            f"the {what} of {run} is a file inside it, {file}.", "Move the file to a directory of your own code."
        )
    if file != file.resolve():
        # Lockstep writes absolute paths. A relative path could refer to another file in the current directory.
        raise ConfigError(
            f"the {what} of {run} is {file}, which is not an absolute path.",
            f"If you trust the file, write its absolute path into {run / CONFIG}.",
        )


def load_algorithm(run: Path, recipe: Recipe, at: int | None = None, device: str = "cpu") -> Algorithm:
    """Load the algorithm of a run at its best checkpoint, or at `at` samples. The task is closed again."""
    directory = run / CHECKPOINTS
    # Check the weights only: they are usable even if replay or environment state is damaged.
    name = _best_or_newest(directory) if at is None else find(directory, at, form.verify_weights)[0]
    if name is None:
        raise ConfigError(
            f"{run} has no checkpoint yet.", "Wait for its first save, or train it: lockstep resume " + str(run)
        )
    algorithm = build_algorithm(recipe, device)
    with form.user_facing_errors(directory / str(name)):
        algorithm.load_shared_state(form.strip_prefix(form.read_shared(directory / str(name)), "algorithm"))
    return algorithm


def build_algorithm(recipe: Recipe, device: str = "cpu") -> Algorithm:
    """Build an untrained algorithm."""
    runtime = Runtime.single_process(recipe.run, device, hosting=range(1))  # one lane suffices to build an agent
    with closing(recipe.task.build(runtime.lanes, runtime.device)) as task:
        algorithm: Algorithm = recipe.algo.build(task, runtime)
    return algorithm


def _best_or_newest(directory: Path) -> CheckpointName | None:
    best = best_checkpoint(directory) if directory.is_dir() else None
    if best is not None:
        try:
            form.verify_weights(directory / str(best))
            return best
        except form.CorruptCheckpointError as error:
            warnings.warn(f"The best checkpoint is damaged: {error}. Using the newest intact one.", stacklevel=3)
    return find(directory, None, form.verify_weights)[0]


def _as_tensor(obs: Any, device: torch.device) -> Tensor:
    tensor = obs if isinstance(obs, Tensor) else torch.from_numpy(np.asarray(obs))
    return (tensor.float() if tensor.dtype == torch.float64 else tensor).to(device)
