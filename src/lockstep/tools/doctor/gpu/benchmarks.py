"""Measure updates per second on one GPU with CUDA events, for every value of run.compile."""

import statistics
from typing import Any

import torch

from lockstep.config import Recipe, apply_overrides
from lockstep.ops.compilation import WARM_UPS
from lockstep.registry import find_recipe
from lockstep.tools.doctor.gpu.gradients import Agent
from lockstep.tools.doctor.gpu.recipes import GPU, smoke_recipe
from lockstep.tools.doctor.gpu.worker import ResultRecord, Skip

MODE_RECIPES = ("snake-ppo", "gym-ppo", "gym-ddpg")
QUICK_RECIPE = "gym-ppo"
ROUNDS, QUICK_ROUNDS = 10, 2


def mode(record: ResultRecord, compile_mode: str) -> None:
    """Time iterations with one value of run.compile. A mode that does not work is skipped, except "off"."""
    settings = {"run.compile": compile_mode}
    for name in (QUICK_RECIPE,) if record.quick else MODE_RECIPES:
        with record.part(name):
            recipe = smoke_recipe(name) if record.quick else find_recipe(name)()
            record.add(name, timed(apply_overrides(recipe, settings), QUICK_ROUNDS if record.quick else ROUNDS))
    if record.failures and compile_mode != "off":
        raise Skip("; ".join(record.failures))


def timed(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """Return updates and samples per second on one GPU, timed with CUDA events."""
    agent = Agent(recipe, GPU)
    agent.iterate(lambda: bool(agent.algorithm.updates > WARM_UPS))
    agent.iterate()  # compilation and CUDA graph capture end here
    updates_before, samples, iterations = int(agent.algorithm.updates), 0, []
    agent.runtime.timer.take()
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        agent.iterate()
        end.record()
        end.synchronize()
        iterations.append(start.elapsed_time(end) / 1e3)
        samples += int(agent.algorithm.samples)
    torch.cuda.synchronize()
    phases = agent.runtime.timer.take()  # CUDA events at every change of phase
    learning = phases.get("learn", 0.0) + phases.get("reduce", 0.0)
    updates = int(agent.algorithm.updates) - updates_before
    agent.close()
    return {
        "rounds": rounds,
        "updates": updates,
        "updates_per_second": updates / learning if learning else None,
        "samples_per_second": samples / sum(iterations),
        "iteration_seconds": statistics.median(iterations),
        "phase_seconds": {name: seconds / rounds for name, seconds in phases.items()},
        "notes": list(agent.runtime.pending_messages),
    }
