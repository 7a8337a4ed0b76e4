"""Evaluation on a device: the scores of the CPU, and few host synchronizations. A failure names their lines."""

from dataclasses import replace

import pytest

import emulated_cuda
from lockstep import evaluate as module
from lockstep.config import RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.evaluate import CHECK_EVERY, evaluate
from lockstep.registry import find_recipe
from processes import together

REST = 12
"""Synchronizations of a whole evaluation: the tables of the environment are copied there, the results are read."""


def scored(device, backend, episodes):
    """Scores of an agent that has learned nothing, steps taken, and synchronizations with their lines."""
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


def test_evaluation_of_a_device_environment_waits_in_one_of_sixteen_steps():
    found = on_gpu("cuda:0", "torch", 160)
    assert found["steps"] > 4 * CHECK_EVERY  # else the bound says nothing
    assert found["steps"] % CHECK_EVERY == 0
    assert found["syncs"] <= found["steps"] / CHECK_EVERY + REST, f"evaluation waits at: {found['lines']}"


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_evaluation_on_a_device_gives_the_scores_of_the_cpu(backend):
    ours, theirs = (on_gpu(device, backend, 13) for device in ("cuda:0", "cpu"))
    assert ours["scores"] == theirs["scores"]
    assert ours["scores"]["episodes"] == 13
    assert ours["steps"] - theirs["steps"] < CHECK_EVERY
