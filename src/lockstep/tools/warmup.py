"""Compile the numba kernels of all recipes ahead, into numba's cache: one short training per recipe and preset."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.launch.kernel_compilation import announce_compilation, compiled_kernels
from lockstep.registry import RECIPES, find_recipe
from lockstep.training_loop import iterate

MAX_ITERATIONS = 64
"""Iterations until an algorithm that first fills a replay buffer must have learned."""
WITHOUT_KERNELS = ("cricket-gnn",)
"""Recipes that use no kernel."""


def warm_up(progress: Callable[[str], None]) -> None:
    """Compile every kernel that the recipes use. `progress` receives one line per recipe and preset."""
    variants = list(_variants())
    for number, (label, recipe) in enumerate(variants, 1):
        start, before = time.perf_counter(), len(compiled_kernels)
        progress(f"{number} of {len(variants)}: {label}")
        try:
            _train_briefly(recipe)
        except (ConfigError, ImportError) as error:  # an extra is not installed
            progress(f"{number} of {len(variants)}: {label}, skipped: {str(error).partition(chr(10))[0]}")
            continue
        count = len(compiled_kernels) - before
        result = f"{count} kernels compiled" if count else "in the cache"
        progress(f"{number} of {len(variants)}: {label}, {result}, {time.perf_counter() - start:.0f} s")


def cache_directory() -> Path:
    """Return the directory in which numba caches the kernels of tasks."""
    from lockstep.tasks.kernels import philox

    kernel: Any = philox
    return Path(kernel._cache.cache_path)


def _variants() -> Iterator[tuple[str, Recipe]]:
    for name in RECIPES:
        if name in WITHOUT_KERNELS:
            continue
        recipe = find_recipe(name)
        for preset in ("", *recipe.presets):
            overrides = [recipe.presets[preset]] if preset else []
            variant = recipe()
            for values in (*overrides, recipe.smoke_overrides):
                variant = apply_overrides(variant, values)
            yield f"{name} --preset {preset}" if preset else name, variant


def _train_briefly(recipe: Recipe) -> None:
    """Collect, learn and evaluate until the first update, without files."""
    runtime = Runtime.single_process(recipe.run)
    announce_compilation(runtime.phase)
    task = recipe.task.build(runtime.lanes, runtime.device)
    try:
        algorithm = recipe.algo.build(task, runtime)
        clock = TrainState(total_samples=recipe.run.total_samples)
        for _ in range(MAX_ITERATIONS):
            iterate(task, algorithm, clock, runtime, recipe.run.replica_check_every)
            if algorithm.updates:
                break
        evaluate(algorithm.policy(), recipe.task, runtime, episodes=1)
    finally:
        task.close()
