"""TD-MPC2's own layout of weights, so that agents trained with its authors' code can be loaded, and ours there.

What is read is a state dict that somebody has loaded already (`torch.load(..., weights_only=True)["model"]`): nothing
here opens a file. Both forms of their checkpoints are understood: critics named by layer, and, older, by number.
"""

import re

import torch
from torch import Tensor

from lockstep.algorithms.tdmpc2.world_model import HIGHEST, LOWEST
from lockstep.protocols import StateDict

NETS = {
    "encoder": "_encoder.state",
    "dynamics": "_dynamics",
    "reward": "_reward",
    "termination": "_termination",
    "policy": "_pi",
    "task": "_task_emb",
}
"""Our networks, and theirs."""
LEAVES = ("weight", "bias", "ln.weight", "ln.bias")
"""Parts of a layer, as the older form counts them."""


def from_reference(theirs: StateDict) -> StateDict:
    """Weights as `TDMPC2.weights()` names them."""
    found: StateDict = {}
    for name, tensor in theirs.items():
        ours = _ours(name)
        if ours is not None and isinstance(tensor, Tensor):
            found[ours] = tensor.float()
    if not any(name.startswith("targets.") for name in found):
        raise ValueError("these are not the weights of a TD-MPC2 agent: they have no critics that are targets.")
    return found


def to_reference(weights: StateDict, masks: Tensor | None = None) -> StateDict:
    """The same backwards; `masks` are those of several tasks' actions."""
    made: StateDict = {"log_std_min": torch.tensor(LOWEST), "log_std_dif": torch.tensor(HIGHEST - LOWEST)}
    if masks is not None:
        made["_action_masks"] = masks
    for name, tensor in weights.items():
        owner, _, rest = name.partition(".")
        net, _, leaf = rest.partition(".")
        value = tensor.detach().clone()
        if owner == "targets":
            made[f"_target_Qs_params.{rest}"] = value
        elif net == "critics":
            made[f"_Qs.params.{leaf}"] = made[f"_detach_Qs_params.{leaf}"] = value
        elif leaf.startswith("layers."):
            made[f"_encoder.rgb.{_move(leaf.removeprefix('layers.'), 2)}"] = value
        else:
            made[f"{NETS[net]}.{leaf}"] = value
    return made


def _ours(name: str) -> str | None:
    """Our name for one of theirs; none for what we keep elsewhere, or not at all."""
    critics = re.fullmatch(r"_(target_)?Qs[._]params\.(.+)", name)
    if critics:
        leaf = critics[2]
        if leaf.isdigit():
            leaf = f"{int(leaf) // 4}.{LEAVES[int(leaf) % 4]}"
        owner = "targets" if critics[1] else "model.critics"
        return f"{owner}.{leaf}" if leaf[0].isdigit() else None
    if name.startswith("_encoder.rgb."):
        return f"model.encoder.layers.{_move(name.removeprefix('_encoder.rgb.'), -2)}"
    for ours, theirs in NETS.items():
        if name.startswith(f"{theirs}."):
            return f"model.{ours}.{name.removeprefix(f'{theirs}.')}"
    return None


def _move(leaf: str, by: int) -> str:
    """A layer of pictures, counted with or without the two that have no weights."""
    number, _, rest = leaf.partition(".")
    return f"{int(number) + by}.{rest}"
