"""Convert a policy to a plain torch module, and draw random observations to test it.

Shapes: N observations.
"""

import dataclasses
import math
from contextlib import closing
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from lockstep.base import Algorithm
from lockstep.config import ConfigError, Recipe
from lockstep.lanes import Lanes
from lockstep.protocols import Policy, TaskConfig
from lockstep.pytree import Tree, first_leaf, named_leaves, tree_map
from lockstep.space_layout import policy_obs
from lockstep.tools.export.load_state_dict import first_line

_MAX_BOUND = 1e6
"""Bounds of an observation space beyond this count as unbounded."""


class ExportablePolicy(nn.Module):
    """Policy as a torch module: from observations to actions and network outputs.

    A recurrent policy also takes its recurrent state and returns the next one.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        for name, part in vars(policy).items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
        self.eval()

    def forward(self, obs: Tree, memory: Any = None) -> tuple[Any, ...]:
        action, outputs, after = self._policy.forward(obs, {} if memory is None else memory)
        return (action, outputs, after) if after != {} else (action, outputs)


def exportable_policy(algorithm: Algorithm) -> Policy:
    """Return the policy that can be exported: the policy itself, or the prior of a planner.

    Raises ConfigError if its class lacks a method. To act, a policy does not need `forward`.
    """
    policy = algorithm.policy()
    prior: Policy = getattr(policy, "prior", policy)
    inherited = (None, Policy.forward, nn.Module.forward)  # none of them computes anything
    missing = [f"{name}()" for name in ("initial_state", "forward") if getattr(type(prior), name, None) in inherited]
    if missing:
        raise ConfigError(
            f"{type(prior).__name__} has no {' and no '.join(missing)}, which an export needs.",
            f"Implement {'them' if len(missing) > 1 else 'it'} in the policy: see lockstep.protocols.Policy.",
        )
    return prior


def trace(policy: Policy, obs: Tree) -> torch.export.ExportedProgram:
    """Export a policy as a graph with a dynamic batch size that does not need Lockstep."""
    memory = policy.initial_state(len(first_leaf(obs)))
    args = (obs, memory) if memory != {} else (obs,)
    ragged = getattr(policy, "ragged", False)  # graphs: the second axis varies, too

    def dynamic_axes(x: Tensor) -> dict[int, Any]:
        return {0: torch.export.Dim.DYNAMIC, **({1: torch.export.Dim.AUTO} if ragged and x.dim() > 1 else {})}

    dynamic_shapes = tuple(tree_map(dynamic_axes, part) for part in args)
    try:
        program = torch.export.export(ExportablePolicy(policy), args, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # torch raises arbitrary errors for custom networks
        raise ConfigError(f"torch cannot export this network: {first_line(error)}", "Use --to safetensors.") from error
    # Remove source locations, which are private, and module names, which cannot be loaded if they contain a comma.
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                node.meta.pop(key, None)
    return program


def draw_observations(recipe: Recipe, count: int, seed: int) -> Tree:
    """Draw random observations of a recipe's task [N, ...] as the policy sees them, or examples of its dataset."""
    lanes, device = Lanes(1, range(1), seed), torch.device("cpu")
    if not isinstance(recipe.task, TaskConfig):
        data = recipe.task.build(lanes, device)
        rows = np.random.default_rng(seed).integers(0, data.count("validation"), count)
        inputs: Tree = data.read("validation", np.sort(rows))["inputs"]
        return inputs
    config: Any = recipe.task
    envs = getattr(config, "rows_per_game", 1)
    with closing(dataclasses.replace(config, num_envs=envs).build(lanes, device)) as task:
        return _draw(policy_obs(task.observation_space), count, np.random.default_rng(seed))


def _draw(space: Space[Any], count: int, generator: np.random.Generator) -> Tree:
    if isinstance(space, spaces.Dict):
        return {name: _draw(part, count, generator) for name, part in space.spaces.items()}
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"observations of {space} cannot be drawn.", "Use a Box or Dict observation space.")
    shape = (count, *space.shape)
    if np.issubdtype(space.dtype, np.integer):
        low, high = space.low.astype(np.int64), space.high.astype(np.int64)
        return torch.from_numpy(generator.integers(low, high, shape, endpoint=True).astype(space.dtype))
    bounded = (np.abs(space.low) < _MAX_BOUND) & (np.abs(space.high) < _MAX_BOUND)
    low, high = np.where(bounded, space.low, 0.0), np.where(bounded, space.high, 0.0)
    values = np.where(bounded, generator.uniform(low, high, shape), generator.normal(size=shape))
    return torch.from_numpy(values.astype(space.dtype))


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest absolute difference of two trees of tensors. Infinity if names or shapes differ."""
    other_leaves = named_leaves(other)
    worst = 0.0
    for name, tensor in named_leaves(one).items():
        if name not in other_leaves or tensor.shape != other_leaves[name].shape:
            return math.inf
        distance = (tensor.double() - other_leaves[name].double()).abs()
        distance = distance.masked_fill(tensor == other_leaves[name], 0.0)  # -inf of masked choices
        if not distance.isfinite().all():
            return math.inf
        worst = max(worst, float(distance.max()) if distance.numel() else 0.0)
    return worst
