"""Environment work that `bench` measures."""

import torch

from helpers.toy_envs import ToyWorldsConfig
from lockstep.algorithms.env_benchmark import env_step_op
from lockstep.lanes import Lanes
from lockstep.tasks.snake.env import SnakeConfig

CPU = torch.device("cpu")


def test_env_work_on_cpu_calls_kernel():
    task = SnakeConfig(num_envs=4).build(Lanes(1, range(1), 0), CPU)
    seen = []
    task.step_numpy, task.step = seen.append, None
    work = env_step_op(task, torch.ones(4, dtype=torch.int64), 3)
    work.run()
    assert (work.kind, work.samples, work.calls_per_iteration) == ("env", 4, 3)
    assert [actions.tolist() for actions in seen] == [[1, 1, 1, 1]]


def test_env_work_without_kernel_calls_step():
    task = ToyWorldsConfig(num_envs=4).build(Lanes(1, range(1), 0), CPU)
    task.reset()
    work = env_step_op(task, torch.ones(4, 1), 3)
    assert torch.equal(work.run().obs, task.observations())


def test_env_work_on_other_device_calls_step():
    task = SnakeConfig(num_envs=4).build(Lanes(1, range(1), 0), CPU)
    seen = []
    task.step_numpy, task.step = None, seen.append
    action = torch.ones(4, dtype=torch.int64, device="meta")
    env_step_op(task, action, 3).run()
    assert seen == [action]
