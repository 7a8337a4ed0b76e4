"""Conversion of weights from and to the layout of the authors' TD-MPC2 code.

The input is a state dict that the caller has loaded (`torch.load(..., weights_only=True)["model"]`). This module opens
no files. It reads both reference formats: critics named by layer, and in older checkpoints by number.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.tdmpc2.world_model import LOG_STD_MAX, LOG_STD_MIN, SIZES
from lockstep.protocols import StateDict

NETS = {
    "encoder": "_encoder.state",
    "dynamics": "_dynamics",
    "reward": "_reward",
    "termination": "_termination",
    "policy": "_pi",
    "task": "_task_emb",
}
"""Names of our networks and of the reference's."""
LEAVES = ("weight", "bias", "ln.weight", "ln.bias")
"""Parameters of a layer, in the order of the older format."""
SIZE_FIELDS = ("encoder", "width", "latent", "depth", "num_q")
"""Settings that a size stands for, in its order."""
MASKS = "_action_masks"
"""Reference name of the action masks [tasks, actions] of a model with several tasks."""


def is_reference(weights: Mapping[str, Any]) -> bool:
    """Return whether a state dict has the names of the authors' code."""
    return {"_dynamics.0.weight", "_reward.0.weight", "_pi.0.weight"} <= weights.keys()


def model_settings(weights: StateDict) -> dict[str, Any]:
    """Find the settings of `WorldModelConfig` from converted weights: a size of the reference, with its differences."""
    layers = sum(re.fullmatch(r"model\.encoder\.\d+\.weight", name) is not None for name in weights)
    width, latent = len(weights["model.dynamics.0.weight"]), len(weights["model.dynamics.2.weight"])
    critics, bins = len(weights["targets.0.weight"]), len(weights["model.reward.2.weight"])
    found = {"width": width, "num_q": critics, "latent": latent}
    if layers:  # images have an encoder of one size
        found |= {"encoder": len(weights["model.encoder.0.weight"]), "depth": layers}
    named = {number: dict(zip(SIZE_FIELDS, size, strict=True)) for number, size in SIZES.items()}
    differences = {n: {key: x for key, x in found.items() if x != size[key]} for n, size in named.items()}
    size = min(differences, key=lambda number: len(differences[number]))
    task = weights.get("model.task.weight")
    embedding = {} if task is None else {"task_embedding": task.shape[1]}
    return {"size": size, "bins": bins, **differences[size], **embedding}


def from_reference(weights: StateDict) -> StateDict:
    """Convert reference weights to the names of `TDMPC2.model_state_dict()`."""
    converted: StateDict = {}
    for name, tensor in weights.items():
        our_name = _our_name(name)
        if our_name is not None and isinstance(tensor, Tensor):
            converted[our_name] = tensor.float()
    if "model.task.weight" in converted:
        # The reference limits the norm of an embedding when it is read, so stored norms may be larger than 1.
        converted["model.task.weight"] = converted["model.task.weight"].renorm(2, 0, 1.0)
    if not any(name.startswith("targets.") for name in converted):
        raise ValueError("not a TD-MPC2 state dict: it has no target critics. Use the entry 'model' of a checkpoint.")
    return converted


def to_reference(weights: StateDict, masks: Tensor | None = None) -> StateDict:
    """Convert our weights to reference names. `masks` are the action masks of several tasks."""
    converted: StateDict = {"log_std_min": torch.tensor(LOG_STD_MIN)}
    converted["log_std_dif"] = torch.tensor(LOG_STD_MAX - LOG_STD_MIN)
    if masks is not None:
        converted[MASKS] = masks
    for name, tensor in weights.items():
        owner, _, rest = name.partition(".")
        net, _, leaf = rest.partition(".")
        value = tensor.detach().clone()
        if owner == "targets":
            converted[f"_target_Qs_params.{rest}"] = value
        elif net == "critics":
            converted[f"_Qs.params.{leaf}"] = converted[f"_detach_Qs_params.{leaf}"] = value
        elif leaf.startswith("layers."):
            converted[f"_encoder.rgb.{_shift_layer(leaf.removeprefix('layers.'), 2)}"] = value
        else:
            converted[f"{NETS[net]}.{leaf}"] = value
    return converted


def _our_name(name: str) -> str | None:
    """Return our name for a reference name; None for entries that we store elsewhere or do not have."""
    critics = re.fullmatch(r"_(target_)?Qs[._]params\.(.+)", name)
    if critics:
        leaf = critics[2]
        if leaf.isdigit():
            leaf = f"{int(leaf) // 4}.{LEAVES[int(leaf) % 4]}"
        owner = "targets" if critics[1] else "model.critics"
        return f"{owner}.{leaf}" if leaf[0].isdigit() else None
    if name.startswith("_encoder.rgb."):
        return f"model.encoder.layers.{_shift_layer(name.removeprefix('_encoder.rgb.'), -2)}"
    for our_name, reference_name in NETS.items():
        if name.startswith(f"{reference_name}."):
            return f"model.{our_name}.{name.removeprefix(f'{reference_name}.')}"
    return None


def _shift_layer(leaf: str, offset: int) -> str:
    """Shift the number of a layer of the image encoder. The reference has two more layers, without weights."""
    number, _, rest = leaf.partition(".")
    return f"{int(number) + offset}.{rest}"
