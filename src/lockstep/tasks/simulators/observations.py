"""Observations of simulators: groups by name, each for the policy or for the critic only.

Shapes: E environments of an instance.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict
from torch import Tensor

from lockstep.config import ConfigError
from lockstep.pytree import Tree
from lockstep.space_layout import CRITIC

CRITIC_GROUPS = (CRITIC, "privileged_state")
"""Groups that are for the critic only unless settings say otherwise: Isaac Lab and mjlab, MuJoCo Playground."""
POLICY_GROUPS = ("policy", "actor")
"""Groups of which the first one is the policy's, if there is one. Other groups are not used then, as in rsl_rl."""


class ObsGroups:
    """Converts observations of a simulator to a tree: what the policy sees, and the part `critic`."""

    def __init__(self, policy: Sequence[str], critic: Sequence[str]) -> None:
        """Groups by name for the policy and for the critic only. None: choose them by the usual names."""
        self._policy, self._critic = tuple(policy), tuple(critic)

    def __call__(self, obs: Any) -> Tree:
        """Return observations [E, ...] in float32 or uint8."""
        tree = to_tree(obs)
        if not isinstance(tree, dict):
            self._check_names(())
            return tree
        self._check_names(tree)
        critic = self._critic or tuple(name for name in CRITIC_GROUPS if name in tree)
        usual = [name for name in POLICY_GROUPS if name in tree][:1]
        policy = self._policy or usual or [name for name in tree if name not in critic]
        if not policy:
            raise ConfigError(
                f"the simulator observes {', '.join(tree)}, of which the policy would see nothing.",
                "Name its groups: --task.policy-groups NAME.",
            )
        parts: dict[str, Tree] = {name: tree[name] for name in policy}
        if critic:
            hidden = {name: tree[name] for name in critic}
            return parts | {CRITIC: next(iter(hidden.values())) if len(hidden) == 1 else hidden}
        return parts if len(parts) > 1 else next(iter(parts.values()))

    def _check_names(self, groups: Any) -> None:
        missing = [name for name in (*self._policy, *self._critic) if name not in groups]
        if missing:
            raise ConfigError(
                f"task.policy_groups and task.critic_groups name {', '.join(missing)}, but the simulator observes "
                f"{', '.join(groups) or 'one tensor without groups'}.",
                "Fix the names.",
            )


def to_tree(obs: Any) -> Tree:
    """Return a tensor, or a dict for any mapping (such as a TensorDict), in float32 or uint8."""
    if isinstance(obs, Tensor):
        return obs if obs.dtype in (torch.float32, torch.uint8) else obs.float()
    if hasattr(obs, "items"):
        return {str(name): to_tree(part) for name, part in obs.items()}
    raise ConfigError(
        f"the simulator returns {type(obs).__name__} as an observation, not a torch tensor.",
        "Convert it in task.make, for example with torch.from_dlpack, which copies nothing.",
    )


def space_of(obs: Tree) -> Space[Any]:
    """Return the space of observations [E, ...], by shape and dtype alone."""
    if isinstance(obs, dict):
        return Dict([(name, space_of(part)) for name, part in obs.items()])
    shape = tuple(obs.shape[1:])
    return Box(0, 255, shape, np.uint8) if obs.dtype == torch.uint8 else Box(-np.inf, np.inf, shape, np.float32)
