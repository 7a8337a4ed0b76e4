"""Choose number of environments, rollout length and batch size with short measured probes.

Each number is doubled while this makes a sample at least 10 % cheaper and memory allows it. A larger batch is a
different experiment, so autoscaling is opt-in. The chosen settings and reasons are printed and saved in the config.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import psutil
import torch

from lockstep.config import Recipe, apply_overrides
from lockstep.pytree import leaves
from lockstep.tools.bench.measure import IterationTimer, saved_bytes, single_process_runtime

MAX_COST_RATIO = 0.9
"""Doubling continues while it reduces the time per sample to less than this fraction."""
MAX_FACTOR = 64
"""Largest multiple of the recipe's own number that is probed."""
MEMORY_FRACTION = 0.6
"""Fraction of the free memory that a run may use."""


@dataclasses.dataclass(frozen=True)
class AutoscaleResult:
    """Chosen settings, with a reason for each."""

    settings: dict[str, Any]
    reasons: list[str]


def autoscale(recipe: Recipe, processes: int, report: Callable[[str], None] = lambda _: None) -> AutoscaleResult:
    """Choose settings that use this machine well, for a run on `processes` processes."""
    if (reason := refusal(recipe)) is not None:
        return AutoscaleResult({}, [reason])
    envs, minibatches = recipe.task.num_envs, recipe.algo.samples_per_iteration(recipe.task) // recipe.algo.batch_size

    def acting(count: int) -> tuple[float, float]:
        report(f"probing {count:,} environments")
        meter = _meter(recipe, count, horizon=4)
        size = sum(tensor.nbytes for tensor in leaves(meter.algorithm.sample_buffers())) / 4 * recipe.algo.rollout_steps
        return _seconds(meter, ("env", "act")) / count, size / count

    chosen_envs, envs_reason = _double(envs, acting, processes)

    def learning(batch: int) -> tuple[float, float]:
        report(f"probing batches of {batch:,}")
        meter = _meter(recipe, chosen_envs, horizon=-(-batch // chosen_envs))
        (work,) = (work for work in meter.ops() if work.kind == "learning")
        return _seconds(meter, ("learn",)) / work.samples, saved_bytes(work.run) / work.samples

    chosen_batch, batch_reason = _double(max(recipe.algo.batch_size, chosen_envs), learning, processes)
    step = chosen_batch // math.gcd(chosen_batch, chosen_envs)  # the rollout must be a whole number of minibatches
    horizon = max(step, minibatches * chosen_batch // chosen_envs // step * step)
    minibatches = horizon * chosen_envs // chosen_batch
    settings = {
        "task.num_envs": chosen_envs * processes,
        "algo.batch_size": chosen_batch * processes,
        "algo.rollout_steps": horizon,
    }
    reasons = [
        f"{settings['task.num_envs']:,} environments: {envs_reason}",
        f"batches of {settings['algo.batch_size']:,}: {batch_reason}",
        f"{horizon} steps per rollout: {minibatches} minibatches",
    ]
    if processes > 1:
        reasons.append(f"measured on one process, and multiplied by {processes}")
    growth = settings["algo.batch_size"] / recipe.algo.batch_size
    if growth > 1 and getattr(recipe.algo, "lr_scaling", None) == "none":
        settings["algo.lr_scaling"] = "sqrt"
        reasons.append(f"learning rate times {growth**0.5:.3g}: the square root of the batch's growth, after a warm-up")
    return AutoscaleResult(settings, reasons)


def refusal(recipe: Recipe) -> str | None:
    """Return why a recipe cannot be scaled, or None if it can."""
    settings, algo = {field.name for field in dataclasses.fields(recipe.algo)}, recipe.algo
    batch = f"algo.batch_size ({algo.batch_size:,}, with algo.lr_scaling sqrt)" if "batch_size" in settings else ""
    check = f"Check each with `lockstep bench {recipe.name}`."
    if "buffer_size" in settings:
        return (
            f"{recipe.name} learns from a replay buffer, which the probes do not support: nothing is scaled. To use "
            f"the machine better, double task.num_envs ({recipe.task.num_envs:,}) and {batch}, and keep "
            f"algo.updates_per_sample x algo.batch_size. {check}"
        )
    if not {"rollout_steps", "batch_size", "epochs"} <= settings:
        return (
            f"{recipe.name} collects no rollouts: nothing is scaled. To use the machine better, double "
            f"{batch or 'the batch size'}, and raise algo.num_workers if loading limits it. {check}"
        )
    if getattr(algo, "length", 1) > 1:
        return (
            f"{recipe.name} learns from sequences, which the probes do not support: nothing is scaled. To use the "
            f"machine better, double task.num_envs ({recipe.task.num_envs:,}) and {batch}. {check}"
        )
    return None


def _double(start: int, cost: Callable[[int], tuple[float, float]], processes: int) -> tuple[int, str]:
    """Double a number while this pays. Return it and the reason to stop. `cost` gives seconds and bytes per unit."""
    count, (seconds, size) = start, cost(start)
    free = _free_memory(processes)
    while count < start * MAX_FACTOR:
        if 2 * count * size > free:
            return count, f"twice as many need {2 * count * size / 2**30:.3g} GiB, but {free / 2**30:.3g} are free"
        next_seconds, size = cost(2 * count)
        if next_seconds > MAX_COST_RATIO * seconds:
            gain = max(0.0, 1 - next_seconds / seconds)
            return count, f"{2 * count:,} per process would save only {gain:.0%} of the time per sample"
        count, seconds = 2 * count, next_seconds
    return count, f"{MAX_FACTOR} times the recipe's own number, the largest that is probed"


def _meter(recipe: Recipe, envs: int, horizon: int) -> IterationTimer:
    """Build a timer for one process with `envs` environments and one update per iteration."""
    small = {"task.num_envs": envs, "algo.rollout_steps": horizon, "algo.batch_size": envs * horizon, "algo.epochs": 1}
    return IterationTimer(apply_overrides(recipe, small), single_process_runtime(recipe.run))


def _seconds(meter: IterationTimer, phases: tuple[str, ...]) -> float:
    """Return the shortest time of some phases over three iterations."""
    times = []
    for _ in range(3):
        meter.runtime.timer.take()
        meter.seconds(meter.iterate)
        phase_seconds = meter.runtime.timer.take()
        times.append(sum(phase_seconds[name] for name in phases))
    return min(times)


def _free_memory(processes: int) -> float:
    if torch.cuda.is_available():
        return MEMORY_FRACTION * torch.cuda.mem_get_info()[0]
    return MEMORY_FRACTION * psutil.virtual_memory().available / processes
