"""Wrappers of single Gymnasium environments: hidden or removed parts, stacked frames, action masks. Without torch."""

from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, MultiDiscrete, Tuple

from lockstep.config import ConfigError
from lockstep.space_layout import ACTION_MASK, action_columns, is_channels_last


def wrap(env: Any, id: str, settings: Mapping[str, Any]) -> Any:
    """Wrap an environment by the settings of a task: the functions and classes below, by name."""
    if hidden := settings.get("hidden"):
        env = hide_features(env, hidden)
    if removed := settings.get("removed"):
        env = remove_parts(env, removed)
    if settings.get("float_obs"):
        env = convert_bytes(env)
    if settings.get("frame_stack", 1) > 1:
        env = FrameStack(env, id, settings["frame_stack"])
    return ActionMask(env, id) if settings.get("action_mask") else env


def hide_features(env: Any, hidden: list[int]) -> Any:
    """Replace features of observations by zero."""

    def hide(obs: np.ndarray) -> np.ndarray:
        obs = obs.copy()  # it may be a buffer of the environment
        obs[hidden] = 0
        return obs

    return gymnasium.wrappers.TransformObservation(env, hide, env.observation_space)


def remove_parts(env: Any, names: list[str]) -> Any:
    """Remove parts of dict observations."""
    space = Dict([(name, part) for name, part in env.observation_space.items() if name not in names])

    def remove(obs: dict[str, Any]) -> dict[str, Any]:
        return {name: part for name, part in obs.items() if name not in names}

    return gymnasium.wrappers.TransformObservation(env, remove, space)


def text_parts(space: Space[Any]) -> list[str]:
    """Return the parts of dict observations that are text, such as the mission of MiniGrid: networks have no use."""
    parts = space.items() if isinstance(space, Dict) else ()
    return [name for name, part in parts if part.dtype is not None and part.dtype.kind == "U"]


def removed_parts(space: Space[Any], use_action_mask: bool) -> list[str]:
    """Return the parts of dict observations that a task removes: text, and an action mask that is not used."""
    return text_parts(space) + [ACTION_MASK] * (has_mask_part(space) and not use_action_mask)


def convert_bytes(env: Any) -> Any:
    """Convert observations of uint8 that are symbols, not the brightness of pixels, to float32."""

    def convert(space: Space[Any], obs: Any) -> Any:
        if isinstance(space, Dict):
            return {
                name: obs[name] if name == ACTION_MASK else convert(part, obs[name]) for name, part in space.items()
            }
        return obs.astype(np.float32) if space.dtype == np.uint8 else obs

    def converted(space: Space[Any]) -> Space[Any]:
        if isinstance(space, Dict):
            return Dict([(name, part if name == ACTION_MASK else converted(part)) for name, part in space.items()])
        if isinstance(space, Box) and space.dtype == np.uint8:
            return Box(space.low, space.high, dtype=np.float32)
        return space

    before, after = env.observation_space, converted(env.observation_space)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: convert(before, obs), after)


# Action masks


def has_action_mask(env: Any) -> bool:
    """Return whether an environment has an action mask, in its observations or in the `info` of its resets."""
    if has_mask_part(env.observation_space):
        return True
    try:
        _, info = env.reset(seed=0)
    except Exception:  # the task resets it again, and reports the error as one of the environment
        return False
    return ACTION_MASK in info


class MaskLayout:
    """Form of action masks: the choices of all actions one after another."""

    def __init__(self, action_space: Space[Any], id: str) -> None:
        columns = [count for count in action_columns(action_space) if count]
        if not columns:
            raise ConfigError(
                f"{id} has an action mask, but its actions are {action_space}.",
                "Use --task.use-action-mask false to remove the mask.",
            )
        self._id, self.size = id, sum(columns)
        self._starts = [0, *accumulate(columns[:-1])]  # of the mask of each action

    def add_to(self, space: Space[Any]) -> Dict:
        """Return an observation space with the mask as its last part."""
        parts = [*space.items()] if isinstance(space, Dict) else [("observation", space)]
        mask = (ACTION_MASK, Box(0, 1, (self.size,), np.uint8))
        # A list of pairs, because Dict would sort a mapping.
        return Dict([*((name, part) for name, part in parts if name != ACTION_MASK), mask])

    def check(self, mask: np.ndarray, acts: bool) -> None:
        """Raise a ConfigError if a flat mask has another size, or allows no action where one is to be chosen."""
        if len(mask) != self.size:
            raise ConfigError(
                f"{self._id} returned an {ACTION_MASK} of {len(mask)} values, but its actions have {self.size} "
                "choices.",
                "Return one value for every choice, with the masks of several actions one after another.",
            )
        if acts and not np.logical_or.reduceat(mask, self._starts).all():
            raise ConfigError(
                f"{self._id} has no legal action: all choices of an action are 0 in its {ACTION_MASK}.",
                "End the episode in this state, or allow an action.",
            )


class ActionMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the action mask to observations in one form: uint8, 1 for legal choices, all actions one after another.

    The mask is that of the observation, or `info["action_mask"]` of each reset and step.
    """

    def __init__(self, env: Any, id: str) -> None:
        super().__init__(env)
        self._id, self._in_obs = id, has_mask_part(env.observation_space)
        self._layout = MaskLayout(env.action_space, id)
        self.observation_space = self._layout.add_to(env.observation_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(obs, info, ended=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(obs, info, terminated or truncated), reward, terminated, truncated, info

    def _with_mask(self, obs: Any, info: Mapping[str, Any], ended: bool) -> dict[str, Any]:
        source = obs if self._in_obs else info
        if ACTION_MASK not in source and not ended:
            raise ConfigError(
                f"{self._id} returned no {ACTION_MASK} in the info of a reset or step, but did so before.",
                "Return it in the info of every reset and step, or use --task.use-action-mask false.",
            )
        mask = flatten_mask(self.env.action_space, source.get(ACTION_MASK))
        self._layout.check(mask, acts=not ended)  # no action follows the last observation of an episode
        parts = obs if isinstance(obs, dict) else {"observation": obs}
        return {**parts, ACTION_MASK: mask.view(np.uint8)}


def flatten_mask(space: Space[Any], mask: Any) -> np.ndarray:
    """Return a mask of an action space as booleans in one row. It may be split as the space is; None: all are legal."""
    if mask is None:
        return np.ones(sum(action_columns(space)), bool)
    match space:
        case Dict() if isinstance(mask, Mapping):
            return np.concatenate([flatten_mask(part, mask.get(name)) for name, part in space.items()])
        case Tuple() if isinstance(mask, tuple | list) and len(mask) == len(space):
            return np.concatenate([flatten_mask(part, piece) for part, piece in zip(space, mask, strict=True)])
        case MultiDiscrete() if isinstance(mask, tuple | list):
            return np.concatenate([np.ravel(piece) for piece in mask]) != 0
    return np.ravel(mask) != 0


def has_mask_part(space: Space[Any]) -> bool:
    return isinstance(space, Dict) and ACTION_MASK in space.spaces


# Frame stacking


class FrameStack(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Joins the last observations: images by their channels, as channels-first images, and vectors one after another.

    The first observation of an episode is repeated. An action mask is not stacked.
    """

    def __init__(self, env: Any, id: str, count: int) -> None:
        super().__init__(env)
        self._frames: deque[Any] = deque(maxlen=count)
        self.observation_space = _stacked_space(env.observation_space, count, id)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self._frames.extend([_frame(self.env.observation_space, obs)] * (self._frames.maxlen or 1))
        return _join(self.observation_space, [*self._frames]), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._frames.append(_frame(self.env.observation_space, obs))
        return _join(self.observation_space, [*self._frames]), reward, terminated, truncated, info


def _stacked_space(space: Space[Any], count: int, id: str) -> Space[Any]:
    match space:
        case Box():
            low, high = (np.concatenate([_frame(space, bound)] * count) for bound in (space.low, space.high))
            return Box(low, high, dtype=space.dtype.type)
        case Dict():
            parts = [(n, p if n == ACTION_MASK else _stacked_space(p, count, id)) for n, p in space.items()]
            return Dict(parts)
    raise ConfigError(
        f"--task.frame-stack is {count}, but {id} observes {space}, which has no frames to join.",
        "Use --task.frame-stack 1, or a recurrent policy: --algo.recurrent.kind lstm.",
    )


def _frame(space: Space[Any], obs: Any) -> Any:
    """Return an observation with the axis to join first. Always a copy: it may be a buffer of the environment."""
    if isinstance(space, Dict):
        return {name: np.array(obs[name]) if name == ACTION_MASK else _frame(p, obs[name]) for name, p in space.items()}
    frame = np.array(obs, space.dtype)
    if frame.ndim == 3 and is_channels_last(frame.shape):
        return np.moveaxis(frame, -1, 0)
    return frame if frame.ndim in (1, 3) else frame[np.newaxis]


def _join(space: Space[Any], frames: list[Any]) -> Any:
    """Return frames as one observation, oldest first. The mask is that of the newest."""
    if isinstance(space, Dict):
        return {
            name: frames[-1][name] if name == ACTION_MASK else _join(part, [frame[name] for frame in frames])
            for name, part in space.items()
        }
    return np.concatenate(frames)
