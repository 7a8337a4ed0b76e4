"""Environment steps without the code around them, for `bench`."""

from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.protocols import BenchmarkOp


@runtime_checkable
class HasKernel(Protocol):
    """A task whose environments can be stepped on the host without tensors. Optional: only `bench` uses it."""

    def step_numpy(self, actions: np.ndarray) -> object:
        """Step the environments without tensors, checks and copies."""


def env_work(task: VecEnv, action: Tensor, times: int) -> BenchmarkOp:
    """Return the operation that steps the environments with one action [B, ...], `times` per iteration.

    On the CPU this is the task's kernel, if it has one. Otherwise it is `step`, because work on the device and copies
    to it are part of the operation.
    """
    if action.device.type == "cpu" and isinstance(task, HasKernel):
        kernel, actions = task.step_numpy, action.numpy()
        return BenchmarkOp("env", task.num_envs, times, lambda: kernel(actions))
    return BenchmarkOp("env", task.num_envs, times, lambda: task.step(action))
