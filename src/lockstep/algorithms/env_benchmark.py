"""Environment steps without the code around them, for `bench`."""

from torch import Tensor

from lockstep.base import VecEnv
from lockstep.protocols import BenchmarkOp


def env_step_op(task: VecEnv, action: Tensor, times: int) -> BenchmarkOp:
    """Return the operation that steps the environments with one action [B, ...], `times` per iteration.

    On the CPU this is the task's optional method `step_numpy`, which steps them without tensors, checks and copies.
    Otherwise it is `step`, because work on the device and copies to it are part of the operation.
    """
    kernel = getattr(task, "step_numpy", None)
    if kernel is not None and action.device.type == "cpu":
        actions = action.numpy()
        return BenchmarkOp("env", task.num_envs, times, lambda: kernel(actions))
    return BenchmarkOp("env", task.num_envs, times, lambda: task.step(action))
