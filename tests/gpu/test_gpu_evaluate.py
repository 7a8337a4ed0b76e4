"""Evaluation on a device: scores equal those on the CPU, with few host synchronizations. A failure names the lines."""

from dataclasses import replace

import pytest

import emulated_cuda
from helpers.multiprocess import together
from lockstep import evaluation as module
from lockstep.config import RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.evaluation import CHECK_EVERY, evaluate
from lockstep.registry import find_recipe

REST = 12
"""Synchronizations per evaluation: copies of the environment's tables and reads of the results."""


def scored(device, backend, episodes):
    """Return the scores of an untrained agent, the steps taken, and synchronizations with their lines."""
    kind = find_recipe("snake-ppo")
    recipe = apply_overrides(
        kind(), kind.smoke_overrides | {"task.backend": backend, "task.max_steps_without_food": 60}
    )
    runtime = Runtime.single_process(RunConfig(lanes=2), device)
    task = recipe.task.build(runtime.lanes, runtime.device)
    policy = recipe.algo.build(task, runtime).policy()
    taken = []

    class Counting(module.Scoreboard):
        def count(self, *arguments):
            taken.append(1)
            super().count(*arguments)

    module.Scoreboard = Counting  # this process is forked for one test
    with emulated_cuda.counting() as counted:
        scores = evaluate(policy, replace(recipe.task, num_envs=8), runtime, episodes)
    return {"scores": scores, "steps": len(taken), "syncs": counted.syncs, "lines": dict(counted.by_line)}


def on_gpu(*arguments):
    return together(scored, 1, *arguments, environment={"EMULATED_GPUS": "1"})[0]


def test_evaluation_of_a_device_env_synchronizes_once_per_check_interval():
    found = on_gpu("cuda:0", "torch", 160)
    assert found["steps"] > 4 * CHECK_EVERY  # otherwise the bound is trivial
    assert found["steps"] % CHECK_EVERY == 0
    assert found["syncs"] <= found["steps"] / CHECK_EVERY + REST, f"evaluation waits at: {found['lines']}"


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_evaluation_on_device_matches_cpu_scores(backend):
    ours, theirs = (on_gpu(device, backend, 13) for device in ("cuda:0", "cpu"))
    assert ours["scores"] == theirs["scores"]
    assert ours["scores"]["episodes"] == 13
    assert ours["steps"] - theirs["steps"] < CHECK_EVERY
