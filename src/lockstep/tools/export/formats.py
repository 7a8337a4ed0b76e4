"""Write policies to files that can be used without Lockstep: safetensors, ONNX and torch's pt2.

Each file is loaded again and compared with the policy on the same random observations, over several steps if the
policy has a recurrent state. Actions must be equal. Outputs may differ by rounding.
"""

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import __version__
from lockstep.base import Algorithm
from lockstep.config import ConfigError, Recipe, as_dict
from lockstep.inference import build_algorithm
from lockstep.protocols import Policy
from lockstep.pytree import Tree, load_into, named_leaves, tree_map
from lockstep.tools.export.exportable_policy import draw_observations, exportable_policy, largest_difference, trace
from lockstep.tools.export.load_state_dict import first_line

TOLERANCE = 1e-5
"""Largest difference of outputs that another library computes."""
BATCH_SIZE, STEPS = 64, 4
"""Batch size of the comparison, and number of steps for a recurrent policy."""

Decide = Callable[[Tree, Tree], tuple[Any, Any, Any]]
"""Function from observations and recurrent state to actions, outputs and the next recurrent state."""


def compare(policy: Policy, decide: Decide, recipe: Recipe, tolerance: float) -> float:
    """Return the largest difference of outputs and recurrent states on random observations.

    Raises ConfigError if it exceeds `tolerance` or if actions differ.
    """
    memory = policy.initial_state(BATCH_SIZE)
    worst = 0.0
    for step in range(STEPS if memory != {} else 1):
        obs = draw_observations(recipe, BATCH_SIZE, seed=step)
        action, outputs, after = policy.forward(obs, memory)
        other_action, other_outputs, other_after = decide(obs, memory)
        worst = max(worst, largest_difference({"o": outputs, "m": after}, {"o": other_outputs, "m": other_after}))
        if worst > tolerance or _actions_differ(action, other_action, outputs, tolerance):
            raise ConfigError(
                f"what was written does not act like the policy: outputs differ by {worst:.2g}.",
                "Do not use it. Report this with the recipe and `lockstep doctor --bug-report`.",
            )
        memory = after
    return worst


def _actions_differ(action: Tensor, other: Tensor, outputs: Tensor, tolerance: float) -> bool:
    """Return whether actions differ by more than rounding. Discrete actions with nearly equal scores may differ."""
    if action.is_floating_point():
        scale = 1.0 + float(action.abs().max())
        return largest_difference(action, other) > tolerance * scale
    differ = (action != other).reshape(len(action), -1).any(1)
    best = outputs.reshape(len(outputs), -1).topk(min(2, outputs.reshape(len(outputs), -1).shape[1])).values
    clear = (best[:, 0] - best[:, -1]) > 2 * tolerance
    return bool((differ & clear).any())


# -- safetensors -------------------------------------------------------------------------------------------------------


def write_safetensors(
    path: Path, algorithm: Algorithm, recipe: Recipe, origin: Mapping[str, str] | None = None
) -> float:
    """Write all weights of the agent by name, its recipe, and the checkpoint that they come from, `origin`.

    PyTorch and `lockstep import` can read the file, and `lockstep verify` compares it with its run.
    """
    from safetensors.torch import load_file, save_file

    policy = exportable_policy(algorithm)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in algorithm.model_state_dict().items()}
    metadata = {"lockstep": __version__, "recipe": recipe.name, "config": json.dumps(as_dict(recipe))}
    metadata |= origin or {}
    save_file(weights, str(path), metadata=metadata)
    reloaded = build_algorithm(recipe)
    load_weights(reloaded, load_file(str(path)))
    return compare(policy, exportable_policy(reloaded).forward, recipe, tolerance=0.0)


def load_weights(algorithm: Algorithm, weights: dict[str, Tensor]) -> None:
    """Replace all weights of an agent. Raises ValueError if names or shapes do not match."""
    with torch.no_grad():
        load_into(algorithm.model_state_dict(), weights, "the agent")
    # Load the state through the algorithm, so that it updates derived values (frozen moments).
    algorithm.load_shared_state({name: tensor.clone() for name, tensor in algorithm.shared_state().items()})


# -- graphs ------------------------------------------------------------------------------------------------------------


def write_pt2(path: Path, algorithm: Algorithm, recipe: Recipe) -> float:
    """Write an exported program of torch, used as `torch.export.load(path).module()(obs)` without Lockstep."""
    policy = exportable_policy(algorithm)
    torch.export.save(trace(policy, draw_observations(recipe, 3, seed=0)), path)
    module = torch.export.load(path).module()

    def decide(obs: Tree, memory: Tree) -> tuple[Any, Any, Any]:
        outputs = module(obs, memory) if memory != {} else module(obs)
        return outputs if memory != {} else (*outputs, {})

    return compare(policy, decide, recipe, TOLERANCE)


def write_onnx(path: Path, algorithm: Algorithm, recipe: Recipe) -> float:
    """Write ONNX, with the recurrent state as input and output if there is one. Tested in onnxruntime."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ConfigError(f"ONNX needs {name}, which is not installed.", 'pip install "lockstep-rl[onnx]"')
    import onnxruntime

    policy, obs = exportable_policy(algorithm), draw_observations(recipe, 3, seed=0)
    memory = named_leaves(policy.initial_state(1), "memory")
    inputs = [*named_leaves(obs, "obs"), *memory]
    outputs = ["action", "outputs", *(f"{name}.after" for name in memory)]
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # otherwise it mentions libraries that are not needed
    with warnings.catch_warnings(action="ignore"):
        try:
            program = torch.onnx.export(
                trace(policy, obs), dynamo=True, input_names=inputs, output_names=outputs, verbose=False
            )
        except torch.onnx.OnnxExporterError as error:
            raise ConfigError(
                f"ONNX cannot represent this network: {first_line(error)}",
                "Use --to pt2, or --to safetensors.",
            ) from None
        assert program is not None
        program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    # Observations that the policy does not use are no inputs of the graph.
    used_inputs = {node.name for node in session.get_inputs()}

    def decide(obs: Tree, memory: Tree) -> tuple[Any, Any, Any]:
        values = named_leaves(obs, "obs") | named_leaves(memory, "memory")
        results = session.run(outputs, {name: x.numpy() for name, x in values.items() if name in used_inputs})
        action, raw, *after = (torch.from_numpy(np.asarray(x)) for x in results)
        states = iter(after)
        return action, raw, tree_map(lambda _: next(states), memory)

    return compare(policy, decide, recipe, TOLERANCE)
