"""Action masks of vector environments, added to their observations in the form that `ActionMask` gives single ones.

Shapes: E environments of an instance; C choices of all actions of an environment.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from lockstep.config import ConfigError
from lockstep.space_layout import ACTION_MASK
from lockstep.tasks.gym.spaces import env_actions, make_legal, policy_space
from lockstep.tasks.gym.vector_obs import select_row
from lockstep.tasks.gym.wrappers import MaskLayout, flatten_mask, has_mask_part


def has_vector_mask(env: Any) -> bool:
    """Return whether a vector environment has action masks, in its observations or in the `info` of its resets."""
    if has_mask_part(env.single_observation_space):
        return True
    try:
        _, info = env.reset()
    except Exception:  # it is reset again later, and the error reported as one of the environment
        return False
    return ACTION_MASK in info


def legal_actions(space: Space[Any], masks: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return legal environment actions [E, ...]: of each action, the legal choice with the highest score [E, C]."""
    form = policy_space(space)
    zeros = torch.zeros((len(masks), *(form.shape or ())), dtype=torch.int64)
    return env_actions(space, make_legal(form, zeros, torch.from_numpy(masks), torch.from_numpy(scores)).numpy())


class VectorActionMask:
    """A vector environment whose observations have the action mask as a part: uint8 [E, C], 1 for legal choices."""

    def __init__(self, env: Any, id: str) -> None:
        self._env, self._id = env, id
        self._space: Space[Any] = env.single_observation_space
        self._in_obs = has_mask_part(self._space)
        self._layout = MaskLayout(env.single_action_space, id)
        self.single_observation_space = self._layout.add_to(self._space)
        self._masks = np.ones((env.num_envs, self._layout.size), np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        acting = (options or {}).get("reset_mask", np.ones(self._env.num_envs, bool))  # a reset may remove it
        obs, info = self._env.reset(seed=seed, options=options)
        return self._with_masks(obs, info, acting), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._env.step(actions)
        ended = np.asarray(terminated) | np.asarray(truncated)
        acting = ~ended
        if AutoresetMode(self._env.metadata["autoreset_mode"]) is AutoresetMode.SAME_STEP:
            acting = np.ones_like(ended)  # observations are those of the next episode
            if "final_obs" in info:
                info = {**info, "final_obs": self._mask_final(info["final_obs"], ended)}
        return self._with_masks(obs, info, acting), reward, terminated, truncated, info

    def _with_masks(self, obs: Any, info: Mapping[str, Any], acting: np.ndarray) -> dict[str, Any]:
        """Add masks to a batch of observations: new ones of rows that act next, the last ones of other rows."""
        given: Any = (obs if self._in_obs else info).get(ACTION_MASK)
        present = acting if self._in_obs else acting & info.get(f"_{ACTION_MASK}", given is not None)
        if not np.array_equal(present, acting):
            raise ConfigError(
                f"{self._id} returned no {ACTION_MASK} in the info of a reset or step, but did so before.",
                "Return it in the info of every reset and step, or use --task.use-action-mask false.",
            )
        for row in np.flatnonzero(acting):
            mask = flatten_mask(self._env.single_action_space, given[row])
            self._layout.check(mask, acts=True)
            self._masks[row] = mask
        parts = obs if isinstance(obs, dict) else {"observation": obs}
        return {**parts, ACTION_MASK: self._masks.copy()}

    def _mask_final(self, final_obs: Any, ended: np.ndarray) -> np.ndarray:
        """Return the last observations as an array of objects, with masks. No action follows them."""
        rows = np.full(len(ended), None, object)
        for row in np.flatnonzero(ended).tolist():
            obs = select_row(self._space, final_obs, row)
            parts = obs if isinstance(obs, dict) else {"observation": obs}
            rows[row] = {**parts, ACTION_MASK: np.ones(self._layout.size, np.uint8)}
        return rows
