"""Description of a task that suffices to build an agent for it: spaces and agents, without environments.

A run directory contains it, so that a policy can be loaded where the packages of its environments are not installed.
"""

import json
import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from lockstep.io.safe_read import JSON_BYTES
from lockstep.protocols import SubtaskSpec
from lockstep.pytree import Tree

OPTIONAL = ("agents", "rivals", "parts")
"""Attributes that only some tasks have."""
MAX_ELEMENTS = 2**24
"""Largest size of a space in a file. A damaged file cannot trigger a larger allocation."""


class InvalidSpecError(ValueError):
    """A description is damaged."""


class NotRecordedError(Exception):
    """An algorithm needs an attribute of its task that a description does not contain."""


class TaskSpec:
    """The attributes of a task that algorithms read when they are built. Observations are zeros."""

    observation_space: Space[Any]
    action_space: Space[Any]

    def __init__(self, values: dict[str, Any], num_envs: int, device: torch.device) -> None:
        """`values` is the content of a description. Raise InvalidSpecError if it is damaged."""
        self.num_envs, self._device = num_envs, device
        try:
            self.observation_space = _to_space(values["observation_space"])
            self.action_space = _to_space(values["action_space"])
            for name in OPTIONAL:
                if name in values:
                    setattr(self, name, values[name])
            if "parts" in values:
                self.parts = tuple(SubtaskSpec(str(name), int(n), int(length)) for name, n, length in values["parts"])
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidSpecError(f"{type(error).__name__}: {error}") from error

    def observations(self) -> Tree:
        """Return zeros in the form of observations, [num_envs, ...]."""
        return _zeros(self.observation_space, self.num_envs, self._device)

    def close(self) -> None:
        """Do nothing. Tasks have this method."""

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONAL or name.startswith("__"):
            raise AttributeError(name)
        # Not an AttributeError: `getattr(task, name, default)` must not build an agent for another task.
        raise NotRecordedError(name)


def describe_task(task: Any) -> str | None:
    """Return the description of a task as JSON. None: it has no spaces, or they cannot be written."""
    if not hasattr(task, "observation_space"):  # a data set
        return None
    try:
        values = {name: _to_json(getattr(task, name)) for name in ("observation_space", "action_space")}
    except TypeError:
        return None
    text = json.dumps(values | {name: getattr(task, name) for name in OPTIONAL if hasattr(task, name)})
    return text if len(text) <= JSON_BYTES else None


def same_form(one: Space[Any], other: Space[Any]) -> bool:
    """Return whether two spaces have the same type, shape, dtype and choices. Bounds may differ."""
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict):
        return list(one) == list(other) and all(same_form(one[name], other[name]) for name in one)
    if isinstance(one, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return len(one) == len(other) and all(same_form(*parts) for parts in zip(one, other, strict=True))
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return bool(one == other)


def _to_json(space: Space[Any]) -> dict[str, Any]:
    match space:
        case spaces.Box():
            bounds = {"low": _bounds_to_json(space.low), "high": _bounds_to_json(space.high)}
            return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.name, **bounds}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
        case spaces.Dict():
            return {"type": "Dict", "parts": [[name, _to_json(part)] for name, part in space.items()]}
        case spaces.Tuple():
            return {"type": "Tuple", "parts": [_to_json(part) for part in space]}
    raise TypeError(f"{space} has no form in JSON")


def _to_space(values: dict[str, Any]) -> Space[Any]:
    match values["type"]:
        case "Box":
            shape, dtype = tuple(map(int, values["shape"])), np.dtype(str(values["dtype"]))
            if dtype.kind not in "biuf" or min(shape, default=1) < 0 or math.prod(shape) > MAX_ELEMENTS:
                raise ValueError(f"{dtype} {shape} is not the form of an observation or action")
            low, high = (_to_bounds(values[name], shape, dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "Discrete":
            return spaces.Discrete(_count(values["n"]), start=int(values["start"]))
        case "MultiDiscrete":
            nvec, start = (np.asarray(values[name], np.int64) for name in ("nvec", "start"))
            _count(nvec.sum())
            return spaces.MultiDiscrete(nvec, start=start)
        case "Dict":
            # A list of pairs, because Dict would sort a mapping.
            return spaces.Dict([(str(name), _to_space(part)) for name, part in values["parts"]])
        case "Tuple":
            return spaces.Tuple([_to_space(part) for part in values["parts"]])
    raise ValueError(f"{values['type']!r} is not a space")


def _count(choices: Any) -> int:
    if not 0 < int(choices) <= MAX_ELEMENTS:
        raise ValueError(f"{choices} is not a number of choices")
    return int(choices)


def _bounds_to_json(bounds: np.ndarray) -> Any:
    """Return one number if all bounds are equal, otherwise a flat list. Infinity is text, since JSON has none."""
    values = [str(x) if math.isinf(x) else x for x in bounds.ravel().tolist()]
    return values[0] if len(set(values)) == 1 else values


def _to_bounds(values: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    numbers = values if isinstance(values, list) else [values]
    flat = np.array([float(x) if isinstance(x, str) else x for x in numbers], dtype)
    return np.broadcast_to(flat[0], shape) if len(flat) == 1 else flat.reshape(shape)


def _zeros(space: Space[Any], count: int, device: torch.device) -> Tree:
    if isinstance(space, spaces.Dict):
        return {name: _zeros(part, count, device) for name, part in space.items()}
    return torch.from_numpy(np.zeros((count, *(space.shape or ())), space.dtype)).to(device)
