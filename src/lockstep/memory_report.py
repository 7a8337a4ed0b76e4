"""Name the largest consumers of memory when a process runs out of it, and what halving each would save."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.base import Algorithm
from lockstep.config import Recipe
from lockstep.pytree import leaves

_COPIES = 4
"""Copies of the parameters in memory: weights, gradients and the two moments of Adam."""


@contextmanager
def explain_out_of_memory(recipe: Recipe, algorithm: Algorithm | None = None) -> Iterator[None]:
    """Add the largest consumers of memory to an error about memory, as a note."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        error.add_note(largest_consumers(recipe, algorithm))
        raise


def largest_consumers(recipe: Recipe, algorithm: Algorithm | None) -> str:
    """Describe what needs memory, largest first. Before the algorithm is built, only the settings are known."""
    settings = {
        name: f"{group}.{field} ({value:,})"
        for name, group, field in (
            ("replay", "algo", "buffer_size"),
            ("envs", "task", "num_envs"),
            ("steps", "algo", "rollout_steps"),
            ("batch", "algo", "batch_size"),
        )
        if isinstance(value := getattr(getattr(recipe, group), field, None), int)
    }
    rollout = " or ".join(settings[name] for name in ("envs", "steps") if name in settings)
    batch = f"Half of {settings['batch']} halves the memory of backward." if "batch" in settings else ""
    if algorithm is None:
        parts = [f"half of {setting} halves its memory" for setting in (settings.get("replay"), rollout) if setting]
        return f"The agent was not built yet: {', '.join(parts)}. {batch}".strip()
    buffers: Any = algorithm.sample_buffers()
    replay = buffers.pop("replay", {})
    sizes = [
        ("replay buffer", _bytes(replay), settings.get("replay", "")),
        ("collected samples", _bytes(buffers), rollout),
        ("networks, gradients and optimizer", _COPIES * _bytes(algorithm.model_state_dict()), "the networks"),
    ]
    lines = [
        f"{name} {_mib(size)}: half of {setting} saves {_mib(size / 2)}"
        for name, size, setting in sorted(sizes, key=lambda part: -part[1])
        if size and setting
    ]
    return f"Of this process, {'; '.join(lines)}. {batch}".strip()


def _bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in leaves(tree))


def _mib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
