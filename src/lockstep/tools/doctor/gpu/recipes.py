"""Check one recipe on one GPU: gradients compared with the CPU, a smoke run, host synchronizations and memory."""

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.registry import find_recipe
from lockstep.tools.doctor.gpu.gradients import Agent, difference, first_gradients
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, Skip
from lockstep.training_loop import train

TOLERANCE = 1e-3
"""Largest relative difference of a gradient in fp32 between a GPU and the CPU that counts as rounding."""
GRADIENT_SETTINGS = {"dmc-tdmpc2": {"task.tasks": ["cartpole-balance"]}}
"""Settings by recipe for the gradient comparison. The pendulum of the smoke settings has zero reward at first."""
GPU = "cuda:0"
SYNC_ITERATIONS = 2
"""Iterations in which host synchronizations are counted."""
FULL_SECONDS = 20
"""Seconds for a first update at the recipe's default settings."""


def recipe(record: ResultRecord, name: str) -> None:
    """Run every part for one recipe. A recipe that needs a package which is not installed is skipped."""
    with needs_installed():
        smoke = smoke_recipe(name)
        gradient_recipe = apply_overrides(smoke, GRADIENT_SETTINGS.get(name, {}))
        expected = first_gradients(gradient_recipe, "cpu")
    with record.part("gradients"):
        compare_gradients(record, expected, first_gradients(gradient_recipe, GPU))
    with record.part("smoke"):
        smoke_run(record, smoke)
    with record.part("host_syncs"):
        host_syncs(record, smoke)
    if not record.quick:
        with record.part("memory_full"):
            full_memory(record, find_recipe(name)())


@contextlib.contextmanager
def needs_installed() -> Iterator[None]:
    """Raise Skip if a package is not installed."""
    try:
        yield
    except (ImportError, ConfigError) as error:
        if isinstance(error, ConfigError) and "pip install" not in str(error):
            raise
        raise Skip(f"not installed: {' '.join(str(error).split())}") from None


def smoke_recipe(name: str) -> Recipe:
    """A recipe at its smoke settings."""
    recipe_class = find_recipe(name)
    return apply_overrides(recipe_class(), recipe_class.smoke_overrides)


def compare_gradients(record: ResultRecord, expected: list[list[Tensor]], found: list[list[Tensor]]) -> None:
    """Compare the first gradient of every optimizer between the GPU and the CPU."""
    if len(found) != len(expected):
        raise Failure(f"{len(found)} optimizers took a step on the GPU and {len(expected)} on the CPU")
    differences = [difference(*pair) for pair in zip(found, expected, strict=True)]
    norms = [float(get_total_norm(gradient)) for gradient in expected]
    comparison = {
        "largest_relative_difference": max(differences),
        "tolerance": TOLERANCE,
        "by_optimizer": differences,
        "norms": norms,
        "parameters": [sum(part.numel() for part in gradient) for gradient in expected],
    }
    record.add("gradients", comparison)
    if not all(norms):
        raise Failure("a gradient is zero, so the comparison is meaningless")
    if not max(differences) <= TOLERANCE:
        raise Failure(f"they differ from the CPU by {max(differences):.1e}, more than {TOLERANCE:.0e}")


def smoke_run(record: ResultRecord, recipe: Recipe) -> None:
    """Train at smoke settings to the end, with checkpoints and (unless quick) evaluations; record peak memory."""
    location = {"run.runs_dir": str(record.scratch), "run.name": f"smoke-{recipe.name}", "run.device": "cuda"}
    shorter = {"run.eval_every": None, "run.total_samples": recipe.run.total_samples // 2} if record.quick else {}
    torch.cuda.reset_peak_memory_stats()
    result = train(apply_overrides(recipe, location | shorter))
    record.add("smoke", {"samples": result.clock.samples, "seconds": result.seconds})
    record.add("memory", memory_peak())


def memory_peak() -> dict[str, int | None]:
    """Peak memory of this process on its GPU in bytes. None if the device does not report it."""
    sizes = {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return {name: size or None for name, size in sizes.items()}


def full_memory(record: ResultRecord, recipe: Recipe) -> None:
    """Record peak memory at the recipe's default settings, up to and including its first iteration with updates."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        with time_limit(FULL_SECONDS):
            agent = Agent(recipe, GPU)
            agent.iterate(agent.learned)
            agent.close()
    except TimeoutError:
        torch.cuda.synchronize()  # kernels may still run when the process ends
        raise Skip(f"no update within {FULL_SECONDS} s") from None
    except torch.OutOfMemoryError as error:
        raise Skip(f"out of memory: {' '.join(str(error).split())[:200]}") from None
    record.add("memory_full", memory_peak())


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, at the next Python instruction."""

    def expire(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def host_syncs(record: ResultRecord, recipe: Recipe) -> None:
    """Count per source line how often the host waits for the GPU, with torch's sync debug mode."""
    agent = Agent(recipe, GPU)
    agent.iterate(agent.learned)
    agent.iterate()
    updates_before = agent.algorithm.updates
    torch.cuda.synchronize()
    with sync_warnings() as lines:
        for _ in range(SYNC_ITERATIONS):
            agent.iterate()
    counts = [{"line": line, "count": count} for line, count in lines.most_common()]
    updates = int(agent.algorithm.updates - updates_before)
    agent.close()
    found = {"iterations": SYNC_ITERATIONS, "updates": updates, "total": lines.total(), "lines": counts}
    record.add("host_syncs", found)


@contextlib.contextmanager
def sync_warnings() -> Iterator[Counter[str]]:
    """Count torch's warnings about synchronizing operations by the line of Lockstep that caused them."""
    lines: Counter[str] = Counter()

    def count(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            lines[calling_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            torch.cuda.set_sync_debug_mode("default")


def calling_line() -> str:
    """Return the innermost frame of Lockstep outside this file, such as `distributed/optimizer.py:118`."""
    package = f"{os.sep}lockstep{os.sep}"
    for frame, line in traceback.walk_stack(sys._getframe()):
        path = frame.f_code.co_filename
        if package in path and path != __file__:
            return f"{path.rpartition(package)[2]}:{line}"
    return "elsewhere"
