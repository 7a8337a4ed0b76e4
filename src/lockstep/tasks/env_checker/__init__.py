"""Checker of the task contract: run it on a new task before training on it.

`for fault in check_env(MyConfig()): print(fault)` prints a message with a fix for every violation.
"""

import random
from typing import Any

import numpy as np
import torch

from lockstep.protocols import TaskConfig
from lockstep.tasks.env_checker.datasets import check_dataset
from lockstep.tasks.env_checker.environments import check_environments


def check_env(config: Any, steps: int = 200, chance: bool = True) -> list[str]:
    """Return a message for every violation of the task contract; an empty list if there is none.

    Args:
        config: Settings of environments, whose `num_envs` is replaced, or of a data set.
        steps: Steps to play; must be longer than an episode.
        chance: Whether the task is random. Pass False for a deterministic task.
    """
    before = _global_random()
    if isinstance(config, TaskConfig):
        faults = check_environments(config, steps, chance)
    else:
        faults = [*check_dataset(config)]
    for name, state in _global_random().items():
        if state != before[name]:
            faults += [f"The task draws from the global state of {name}, which other code shares. Use a RandomStream."]
    return faults


def _global_random() -> dict[str, Any]:
    legacy: Any = np.random.get_state()
    return {
        "random": random.getstate(),
        "numpy.random": (legacy[1].tobytes(), legacy[2]),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
