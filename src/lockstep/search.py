"""Public Python API that searches settings: `lockstep.sweep`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.api import AnyRecipe, resolve_recipe
from lockstep.script_launch import make_importable, refuse_launched_process
from lockstep.sweeps.sweep import Sweep


def sweep(
    recipe: AnyRecipe,
    space: Mapping[str, Any] | str | Path,
    *,
    trials: int = 20,
    metric: str | None = None,
    direction: Literal["maximize", "minimize"] = "maximize",
    prune: Literal["asha", "median", "pbt", "none"] = "asha",
    min_samples: int | None = None,
    eta: int = 3,
    sampler: Literal["tpe", "random"] = "tpe",
    seed: int = 0,
    window: int = 8,
    smoke: bool = False,
    preset: str | None = "auto",
    procs: int = 1,
    parallel: int | None = None,
    storage: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Sweep:
    """Search for good settings of a recipe: train trials with different settings, and stop bad ones early.

    The results depend neither on `parallel` nor on interruptions. A sweep that was stopped is resumed by
    `lockstep.Sweep(path).resume()`.

    Args:
        recipe: Name of a recipe, path of a Python file that defines one, or a recipe.
        space: Range or choices by dotted name, such as {"algo.gamma": [0.95, 0.99]}, or path of a YAML file.
        trials: Number of trials.
        metric: Metric in the log, of which the newest value counts. None: score or mean return of the last evaluation;
            without evaluations, the mean return of the last 100 training episodes.
        direction: Whether higher or lower values are better.
        prune: Trials that stop early. "asha": all but the best 1/eta at each rung. "median": those below the median.
            "pbt": none; the worst quarter continues from copies of the best, with changed settings.
        min_samples: Global samples before the first decision. None: `run.total_samples` / eta² for "asha", a quarter
            of it for "median", a tenth for "pbt".
        eta: One trial in this number continues after a rung of "asha", and each rung has this number of times more
            samples.
        sampler: Settings of the trials. "tpe": Optuna's tree-structured Parzen estimator, after 10 random trials.
        seed: Seed of the sampler.
        window: Trial k is suggested from the results of trials 0 to k - window.
        smoke: Use the recipe's smoke setting.
        preset: Preset of the recipe, as in `train`.
        procs: Processes of each trial.
        parallel: Trials at a time. None: as many as the GPUs of the machine allow, or its cores if it has no GPU.
        storage: URL of a database for a copy of the study. None: only the file in the directory.
        overrides: Settings of all trials by dotted name.
        **settings: Settings of all trials by group, as in `train`.

    Returns:
        The sweep, with its `table` and its `best` trial. One that was stopped is returned, too.

    Raises:
        ConfigError: A setting or an entry of the space is invalid.
        RuntimeError: Some trials ended with an error. The message names them and the files with their output.
    """
    from lockstep.launch.device import require_gpus
    from lockstep.sweeps.sweep_runs import create_sweep, plan_sweep

    refuse_launched_process()
    resolved = resolve_recipe(recipe, smoke, preset, procs, {**(overrides or {}), **settings})
    make_importable(resolved, required=True)
    require_gpus(resolved.run.device, procs, resolved.run.share_gpu)
    record = plan_sweep(
        resolved,
        Path(space) if isinstance(space, str) else space,
        trials=trials,
        metric=metric,
        direction=direction,
        prune=prune,
        min_samples=min_samples,
        eta=eta,
        sampler=sampler,
        seed=seed,
        window=window,
        procs=procs,
        command=f'lockstep.sweep("{resolved.name}", trials={trials}, procs={procs})',
    )
    created = Sweep(create_sweep(resolved, record))
    created.resume(parallel=parallel, storage=storage)
    return created
