"""Compile the numba kernels of all recipes ahead, into numba's cache: one short training per recipe and preset.

Presets by environment differ only in numbers, which change no kernel.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, Recipe, with_preset
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.launch.kernel_compilation import announce_compilation, compiled_kernels
from lockstep.recipes.env_presets import ENV_PRESETS
from lockstep.registry import RECIPES, find_recipe
from lockstep.tools.bench.measure import IterationTimer

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
        if name not in WITHOUT_KERNELS:
            recipe = find_recipe(name)
            for preset in (None, *(preset for preset in recipe.presets if preset not in ENV_PRESETS)):
                label = f"{name} --preset {preset}" if preset else name
                yield label, with_preset(recipe(), preset, smoke=True)


def _train_briefly(recipe: Recipe) -> None:
    """Collect, learn and evaluate until the first update, without files."""
    runtime = Runtime.single_process(recipe.run)
    announce_compilation(runtime.phase)
    timer = IterationTimer(recipe, runtime)
    with closing(timer.task):
        evaluate(timer.algorithm.policy(), recipe.task, runtime, episodes=1)
