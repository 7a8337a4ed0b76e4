"""Load a trained policy in plain Python: no launcher, no process group."""

import warnings
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Tuple
from torch import Tensor

from lockstep.action_encoding import split_actions, unflatten_actions
from lockstep.base import Algorithm
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find, find_best
from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, TASK
from lockstep.protocols import Policy
from lockstep.pytree import Tree, first_leaf, tree_map, tree_where
from lockstep.run_dir import read_config, read_task_spec
from lockstep.space_layout import ACTION_MASK, policy_obs
from lockstep.task_spec import InvalidSpecError, NotRecordedError, TaskSpec
from lockstep.tasks.gym.spaces import env_actions


class LoadedPolicy:
    """Policy with recurrent state. Call `act` on observations and `reset` where an episode ended.

    `recipe` is the recipe of the run, with the settings that it was started with. `observation_space` and
    `action_space` are the spaces of one environment, as the policy sees it; None for a data set.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        device: torch.device,
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.recipe, self.device = policy, recipe, device
        self.observation_space, self.action_space, self.seed = observation_space, action_space, seed
        self._memory: Tree | None = None
        self._samples = 0  # calls that drew random numbers

    def act(self, obs: Any, deterministic: bool = True, action_mask: Any = None) -> Any:
        """Return the action for one observation, or the actions for a batch of observations.

        Args:
            obs: One observation [...], or a batch [N, ...]: an array, a tensor, or a dict of them. The shape of the
                observation space decides which of them it is. A policy with recurrent state needs the same N until
                `reset`.
            deterministic: Whether to act without exploration. False: sample from the policy's distribution (PPO), or
                add the exploration noise of training. The random numbers are defined by the `seed` of `load`.
            action_mask: [choices] or [N, choices], 1 for legal actions. Needed if the policy was trained with masks and
                `obs` does not contain the mask: `info["action_mask"]`.

        Returns:
            The action [...] or actions [N, ...] as a NumPy array; for Dict and Tuple action spaces, a dict or tuple of
            them. Continuous actions are clipped to their bounds, as in training. Discrete actions are counted from 0.

        Raises:
            ConfigError: The shape is that of neither, N changed and the policy has recurrent state, or the policy was
                trained with action masks and there is none.
        """
        batch = tree_map(lambda x: _as_tensor(x, self.device), policy_obs(self._with_mask(obs, action_mask)))
        single = self.observation_space is not None and not _has_batch_axis(self.observation_space, batch)
        if single:
            batch = tree_map(lambda x: x.unsqueeze(0), batch)
        actions = self.act_batch(batch, deterministic).cpu().numpy()
        if isinstance(self.action_space, Dict | Tuple):
            rows = env_actions(self.action_space, actions)
            return split_actions(self.action_space, rows)[0] if single else unflatten_actions(self.action_space, rows)
        if isinstance(self.action_space, Box):
            actions = env_actions(self.action_space, actions)
        return actions[0] if single else actions

    def act_batch(self, batch: Tree, deterministic: bool = True) -> Tensor:
        """Return actions [N, ...] for observations [N, ...] in the form that the environments of a task take."""
        memory = self._memory_of(len(first_leaf(batch)))
        if deterministic:
            action, self._memory = self.policy.act(batch, memory)
        else:
            action, self._memory = self.policy.sample(batch, memory, self.seed, self._samples)
            self._samples += 1
        return action

    def _with_mask(self, obs: Any, action_mask: Any) -> Any:
        """Return an observation with its action mask, as the policy was trained."""
        has_mask = isinstance(self.observation_space, Dict) and ACTION_MASK in self.observation_space.spaces
        if action_mask is not None:
            if not has_mask:
                raise ConfigError("the policy was trained without action masks.", "Call act() without action_mask.")
            parts = obs if isinstance(obs, dict) else {"observation": obs}
            return parts | {ACTION_MASK: action_mask}
        if has_mask and (not isinstance(obs, dict) or ACTION_MASK not in obs):
            raise ConfigError(
                "the policy was trained with action masks, and the observation has none.",
                "Call act(obs, action_mask=mask), for example with info['action_mask'].",
            )
        return obs

    def _memory_of(self, rows: int) -> Tree:
        """Return the recurrent state of a batch of this size."""
        if self._memory is None:
            return self.policy.initial_state(rows)
        self._check_rows(rows, "observations")
        return self._memory

    def _check_rows(self, rows: int, content: str) -> None:
        before = len(first_leaf(self._memory)) if self._memory else rows
        if rows != before:
            raise ConfigError(
                f"the policy has a recurrent state of {before} rows and was given {rows} {content}.",
                "Call reset() before the number of observations changes.",
            )

    def reset(self, mask: Any = None) -> None:
        """Reset the recurrent state. A policy without a recurrent layer ignores it.

        Args:
            mask: [N] bool, true in the rows whose episode ended; one bool for a single observation. None: all rows.
        """
        if mask is None or self._memory is None or self._memory == {}:
            self._memory = None
            return
        rows = torch.as_tensor(mask, dtype=torch.bool, device=self.device).reshape(-1)
        self._check_rows(len(rows), "values of the mask")
        initial_memory = self.policy.initial_state(len(rows))
        self._memory = tree_where(rows, initial_memory, self._memory)


def load(
    run: str | Path, at: int | None = None, device: str = "cpu", recipe: Recipe | None = None, seed: int = 0
) -> LoadedPolicy:
    """Load a policy of a run. It needs no launcher, no process group and no package of its environments.

    Args:
        run: Path of the run directory.
        at: Samples of the checkpoint to load. None: the best checkpoint, or the newest if none was evaluated.
        device: Device of the policy.
        recipe: Recipe of the run. None: read it from the run directory.
        seed: Seed of `act(obs, deterministic=False)`.

    Returns:
        A policy with the methods `act` and `reset`.

    Raises:
        ConfigError: The directory contains no run or no such checkpoint.
    """
    recipe = recipe or load_recipe(Path(run))
    algorithm = load_algorithm(Path(run), recipe, at, device, read_task_spec(Path(run)))
    task: Any = algorithm.task
    observation_space = policy_obs(getattr(task, "observation_space", None))
    action_space = getattr(task, "action_space", None)
    return LoadedPolicy(algorithm.policy(), recipe, torch.device(device), observation_space, action_space, seed)


def load_recipe(run: Path) -> Recipe:
    """Load the recipe of a run directory, with the settings it was started with."""
    return build_recipe(run / CONFIG, *read_config(run))


def build_recipe(source: Path, name: str, settings: Mapping[str, Any]) -> Recipe:
    """Build a recipe from a name and settings that may come from an untrusted file, `source`."""
    from lockstep.registry import find_recipe

    if name.endswith(".py"):
        _refuse_downloaded_code(source, Path(name), "recipe")
    recipe = apply_overrides(find_recipe(name)(), settings)
    if (file := getattr(recipe.task, "code_file", None)) is not None:
        _refuse_downloaded_code(source, file, "environment")
    for file in getattr(recipe.task, "code_files", ()):
        _refuse_downloaded_code(source, file, "submission")
    return recipe


def _refuse_downloaded_code(source: Path, file: Path, what: str) -> None:
    """Reject a Python file next to its settings: a directory from an untrusted source must not execute its own code."""
    directory = source.parent
    if file.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"the {what} of {directory} is a file inside it, {file}.", "Move the file to a directory of your own code."
        )
    if file != file.resolve():
        # Lockstep writes absolute paths. A relative path could refer to another file in the current directory.
        raise ConfigError(
            f"the {what} of {directory} is {file}, which is not an absolute path.",
            f"If you trust the file, write its absolute path into {source}.",
        )


def load_algorithm(
    run: Path, recipe: Recipe, at: int | None = None, device: str = "cpu", spec: dict[str, Any] | None = None
) -> Algorithm:
    """Load the algorithm of a run at its best checkpoint, or at `at` samples.

    Its task is closed, or only a `TaskSpec` if the description of the task is given.
    """
    if (algorithm_class := getattr(recipe.algo, "owner", None)) is not None:
        algorithm_class.require_methods()  # the user's file may have changed since training
    directory = run / CHECKPOINTS
    # Check the weights only: they are usable even if replay or environment state is damaged.
    if at is None:
        name, notes = find_best(directory, form.verify_weights)
        for note in notes:
            warnings.warn(note, stacklevel=3)
    else:
        name, _ = find(directory, at, form.verify_weights)
    if name is None:
        raise ConfigError(
            f"{run} has no checkpoint yet.", "Wait for its first save, or train it: lockstep resume " + str(run)
        )
    try:
        algorithm = build_algorithm(recipe, device, spec)
    except InvalidSpecError as error:
        raise ConfigError(
            f"{run / TASK} is not valid: {error}.", "Remove the file: the task is then built instead."
        ) from None
    with form.user_facing_errors(directory / str(name)):
        algorithm.load_shared_state(form.strip_prefix(form.read_shared(directory / str(name)), "algorithm"))
    return algorithm


def build_algorithm(recipe: Recipe, device: str = "cpu", spec: dict[str, Any] | None = None) -> Algorithm:
    """Build an untrained algorithm, from the description of its task if that suffices."""
    runtime = Runtime.single_process(recipe.run, device, hosting=range(1))  # one lane suffices to build an agent
    algorithm: Algorithm
    if spec is not None and hasattr(recipe.task, "num_envs"):
        num_envs = runtime.lanes.per_lane(recipe.task.num_envs, "num_envs")
        with suppress(NotRecordedError):
            algorithm = recipe.algo.build(TaskSpec(spec, num_envs, runtime.device), runtime)
            return algorithm
    with closing(recipe.task.build(runtime.lanes, runtime.device)) as task:
        algorithm = recipe.algo.build(task, runtime)
    return algorithm


def _has_batch_axis(space: Space[Any], obs: Any) -> bool:
    """Return whether observations [N, ...] were given instead of one observation [...] of the space."""
    if isinstance(space, Dict) and isinstance(obs, dict) and obs.keys() <= space.spaces.keys():
        axes = {_has_batch_axis(space[name], part) for name, part in obs.items()}
        if len(axes) == 1:
            return axes.pop()
    elif not isinstance(space, Dict) and isinstance(obs, Tensor):
        shape, wanted = tuple(obs.shape), space.shape or ()
        if wanted in (shape, shape[1:]):
            return shape != wanted
    raise ConfigError(
        f"observations of shape {_shapes(obs)} were given, but one observation is {space}.",
        "Give one observation, or a batch of them along a new first axis.",
    )


def _shapes(obs: Any) -> Any:
    return tree_map(lambda x: tuple(x.shape), obs)


def _as_tensor(obs: Any, device: torch.device) -> Tensor:
    tensor = obs if isinstance(obs, Tensor) else torch.from_numpy(np.asarray(obs))
    return (tensor.float() if tensor.dtype == torch.float64 else tensor).to(device)
