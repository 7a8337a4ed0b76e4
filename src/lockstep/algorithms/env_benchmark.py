"""The bare work of environments, for `bench`."""

from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from lockstep.protocols import BenchmarkOp, VecEnv


@runtime_checkable
class HasKernel(Protocol):
    """A task whose environments can be stepped on the host without tensors. Optional: only `bench` asks for it."""

    def step_numpy(self, actions: np.ndarray) -> object:
        """Step the environments with nothing around it: no tensors, no checks, no copies."""


def env_work(task: VecEnv, action: Tensor, times: int) -> BenchmarkOp:
    """Step the environments with one action [B, ...] again and again, `times` in an iteration.

    On the CPU this is the task's kernel, if it has one. Elsewhere it is `step`: what the device does, or the copies to
    it, are part of the work.
    """
    if action.device.type == "cpu" and isinstance(task, HasKernel):
        kernel, actions = task.step_numpy, action.numpy()
        return BenchmarkOp("env", task.num_envs, times, lambda: kernel(actions))
    return BenchmarkOp("env", task.num_envs, times, lambda: task.step(action))
