"""Public Python API. `import lockstep` offers these functions without importing torch first.

import lockstep
run = lockstep.train("snake-ppo", smoke=True, procs=2)
print(run.best, run.path)
action = run.load().act(observations)
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

from lockstep.base import VecEnv
from lockstep.config import ConfigError, Recipe, apply_overrides, with_preset
from lockstep.experiment.experiment import Experiment
from lockstep.io.temporary_directory import temporary_directory
from lockstep.protocols import Split
from lockstep.run_results import Callback, Run
from lockstep.script_launch import make_importable, refuse_launched_process, train_run

AnyRecipe: TypeAlias = str | Recipe | type[Recipe]
"""Name of a recipe, path of a Python file that defines one, or a recipe."""


@overload
def train(
    recipe: AnyRecipe,
    *,
    smoke: bool = ...,
    preset: str | None = ...,
    procs: int = ...,
    seeds: None = None,
    init_from: str | Path | None = ...,
    overrides: Mapping[str, Any] | None = ...,
    on_log: Callback | None = ...,
    on_evaluation: Callback | None = ...,
    on_checkpoint: Callback | None = ...,
    **settings: Any,
) -> Run: ...


@overload
def train(
    recipe: AnyRecipe,
    *,
    smoke: bool = ...,
    preset: str | None = ...,
    procs: int = ...,
    seeds: int,
    parallel: int | None = ...,
    init_from: str | Path | None = ...,
    overrides: Mapping[str, Any] | None = ...,
    **settings: Any,
) -> Experiment: ...


def train(
    recipe: AnyRecipe,
    *,
    smoke: bool = False,
    preset: str | None = "auto",
    procs: int = 1,
    seeds: int | None = None,
    parallel: int | None = None,
    init_from: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    **settings: Any,
) -> Run | Experiment:
    """Train a recipe and return its run, or with `seeds` an experiment of several runs.

    Args:
        recipe: Name of a recipe, path of a Python file that defines one, or a recipe.
        smoke: Use the recipe's smoke setting, a run of a few seconds.
        preset: Preset of the recipe, a named set of values. "auto": the preset for the environment, if the recipe is
            given by name and has one. None: the recipe's defaults.
        procs: Number of processes. 1 trains in this process; more start processes on this machine.
        seeds: Number of runs with seeds from `run.seed` on, trained in processes of their own. None: one run.
        parallel: Runs of `seeds` at a time. None: as many as the GPUs of the machine allow, or its cores if it has no
            GPU.
        init_from: Run whose weights to start from: its best checkpoint, or RUN@SAMPLES.
        overrides: Settings by dotted name, such as {"algo.learning_rate": 3e-4}.
        on_log: Called with each log entry, a dict of metrics by name. Callbacks cannot be used with `seeds`.
        on_evaluation: Called with each evaluation.
        on_checkpoint: Called with `samples` and `path` of each published checkpoint.
        **settings: Settings by group. A dict, such as run={"total_samples": 10_000}, changes some fields. A config,
            such as algo=PPOConfig(gamma=0.99), replaces the group, also the values of a preset or smoke setting.

    Callbacks run in this process and get plain data. An exception in a callback ends the run.

    Returns:
        The run, or the experiment if `seeds` is given. A preempted one is returned, too; `status` tells them apart.

    Raises:
        ConfigError: A setting is invalid.
        RuntimeError: The run failed. The message says which process failed and why, or which runs of an experiment.
        KeyboardInterrupt: The processes of a run with `procs` above 1 were interrupted. The run can be resumed.
    """
    from lockstep.bucket.urls import is_url
    from lockstep.run_reservation import reserved

    refuse_launched_process()
    resolved = resolve_recipe(recipe, smoke, preset, procs, {**(overrides or {}), **settings})
    callbacks = on_log, on_evaluation, on_checkpoint
    if seeds is not None:
        return _train_seeds(resolved, seeds, procs, parallel, callbacks, init_from)
    if parallel is not None:
        raise ConfigError("`parallel` needs several runs.", "Pass seeds=N, too.")
    if is_url(resolved.run.runs_dir):
        raise ConfigError(
            f"run.runs_dir is {resolved.run.runs_dir}, and `lockstep.train` needs a directory.",
            "Train a run in a bucket with the command: lockstep train RECIPE run.runs_dir=URL",
        )
    with reserved(resolved) as (path, named, job):
        return train_run(named, path, procs, callbacks, job, init_from=init_from and str(init_from))


def resume(
    run: str | Path | Run,
    *,
    procs: int = 1,
    at: int | None = None,
    total_samples: int | None = None,
    stop_at: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> Run:
    """Resume a run on any number of processes.

    Args:
        run: Run, or path of its directory.
        procs: Number of processes, at most `run.lanes`. It need not be the number that the run was started with.
        at: Samples of the checkpoint to resume from. None: the newest checkpoint.
        total_samples: New value of `run.total_samples`. None: the value that the run was started with.
        stop_at: Save and stop at the end of the first iteration with this number of samples. None: train to the end.
        overrides: Changed settings by dotted name, such as {"algo.learning_rate": 1e-4}. Only settings that change
            nothing that is saved can be changed; the others need a new run with `init_from`.
        on_log: Called with each new log entry.
        on_evaluation: Called with each new evaluation.
        on_checkpoint: Called with `samples` and `path` of each new checkpoint.

    Returns:
        The same run.

    Raises:
        ConfigError: The directory contains no run or no such checkpoint, or a setting is invalid.
        RuntimeError: The run failed. The message says which process failed and why.
    """
    from lockstep.cli.options import resolve
    from lockstep.cli.resume import change_settings
    from lockstep.inference import load_recipe

    refuse_launched_process()
    existing = _as_run(run)
    path, recipe = existing.path, existing.recipe or load_recipe(existing.path)
    total = {} if total_samples is None else {"run.total_samples": total_samples}
    recipe = resolve(change_settings(recipe, {**(overrides or {}), **total}, path), procs)
    callbacks = on_log, on_evaluation, on_checkpoint
    return train_run(recipe, path, procs, callbacks, resume=True, at=at, stop_at=stop_at)


def fork(
    run: str | Path | Run,
    *,
    at: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    procs: int = 1,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> Run:
    """Start a new run from a whole checkpoint of another run, and train it.

    Without changed settings it equals its parent at every later checkpoint. The parent is not changed.

    Args:
        run: Run to fork, or path of its directory. It may be training.
        at: Samples of the checkpoint to start from. None: the newest undamaged checkpoint.
        overrides: Changed settings by dotted name, such as {"algo.learning_rate": 1e-4}, and "run.name" or
            "run.runs_dir" of the fork. Settings that the checkpoint depends on need a new run with `init_from`.
        procs: Number of processes, at most `run.lanes`.
        on_log: Called with each new log entry.
        on_evaluation: Called with each new evaluation.
        on_checkpoint: Called with `samples` and `path` of each new checkpoint.

    Returns:
        The new run.

    Raises:
        ConfigError: The directory contains no run or no such checkpoint, or a setting is invalid.
        RuntimeError: The run failed. The message says which process failed and why.
    """
    from lockstep.cli.fork import fork_settings
    from lockstep.cli.options import resolve
    from lockstep.cli.workers import print_notes
    from lockstep.forking import create_fork
    from lockstep.inference import load_recipe

    refuse_launched_process()
    parent = _as_run(run)
    before = apply_overrides(parent.recipe or load_recipe(parent.path), {"run.runs_dir": str(parent.path.parent)})
    recipe = resolve(fork_settings(before, overrides or {}, parent.path), procs)
    created = create_fork(parent.path, at, before, recipe)
    print_notes(created.notes)
    named = apply_overrides(recipe, {"run.name": created.path.name})
    return train_run(named, created.path, procs, (on_log, on_evaluation, on_checkpoint), resume=True)


def evaluate(
    run: str | Path | Run,
    *,
    episodes: int = 100,
    at: int | None = None,
    seed: int = 1,
    device: str = "cpu",
    split: Split = "test",
) -> dict[str, float]:
    """Evaluate a policy of a run in this process.

    Args:
        run: Run, or path of its directory.
        episodes: Number of episodes. Ignored for data sets.
        at: Samples of the checkpoint to evaluate. None: the best checkpoint.
        seed: Seed of the environments.
        device: Device of the policy and the environments.
        split: Part of a data set, or of the files of a task: train, validation or test.

    Returns:
        Results by name, such as `return_mean`, `return_std` and `episodes`.

    Raises:
        ConfigError: The directory contains no run or no such checkpoint.
    """
    from lockstep.distributed import Runtime
    from lockstep.evaluation import evaluate as run_evaluation

    loaded = _as_run(run).load(at, device)
    runtime = Runtime.single_process(dataclasses.replace(loaded.recipe.run, seed=seed), device)
    scores = run_evaluation(loaded.policy, loaded.recipe.task, runtime, episodes, split)
    assert scores is not None  # only a stop request, which this process never gets, interrupts an evaluation
    return scores


def prove(
    recipe: str, *, procs: Sequence[int] = (1, 2), kill: bool = False, smoke: bool = True, **settings: Any
) -> dict[str, Any]:
    """Train a recipe with exact reduction on several numbers of processes and compare the results bit by bit.

    Args:
        recipe: Name of a recipe, or path of a Python file that defines one.
        procs: Numbers of processes to compare.
        kill: Also kill processes and resume the runs on other numbers of processes.
        smoke: Use the recipe's smoke setting.
        **settings: Settings by group, such as task={"size": 6}.

    Returns:
        The record that `lockstep prove --json` writes. `verdict` is "one agent" if all runs are identical, else
        "not one agent". `rows` has the hash of each run.

    Raises:
        ConfigError: A setting is invalid.
    """
    from lockstep.cli.prove import run

    numbers = [str(number) for number in procs]
    flags = [*(["--kill"] if kill else []), *([] if smoke else ["--no-smoke"])]
    with temporary_directory("prove") as directory:
        record = directory / "proof.json"
        run([recipe, "--procs", *numbers, *flags, "--json", str(record), *_to_args(settings)])
        result: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return result


def make(task: Any, *, seed: int = 0, device: str = "cpu", **settings: Any) -> VecEnv:
    """Build the environments of a recipe or of a task's settings in this process.

    Args:
        task: Name of a recipe, a recipe, a run, or the settings of a task, such as SnakeConfig(size=8).
        seed: Seed of the environments.
        device: Device of observations and rewards.
        **settings: Settings of the task, such as num_envs=16.

    Returns:
        The environments, after their first reset. `observations()` returns their current observations.
    """
    import torch

    from lockstep.inference import load_recipe
    from lockstep.lanes import Lanes

    if isinstance(task, Run):
        task = task.recipe or load_recipe(task.path)
    config = task if dataclasses.is_dataclass(task) and not isinstance(task, Recipe | type) else _recipe(task).task
    changed_config: Any = dataclasses.replace(config, **settings)
    environments: VecEnv = changed_config.build(Lanes(1, range(1), seed), torch.device(device))
    return environments


# -- helpers ---------------------------------------------------------------------------------------------------------


def _recipe(recipe: AnyRecipe) -> Recipe:
    from lockstep.registry import find_recipe

    if isinstance(recipe, str):
        return find_recipe(recipe)()
    return recipe() if isinstance(recipe, type) else recipe


def resolve_recipe(recipe: Any, smoke: bool, preset: str | None, procs: int, settings: Mapping[str, Any]) -> Recipe:
    """Apply preset, smoke setting and settings, in this order, and validate the result."""
    from lockstep.cli.options import resolve, with_absolute_paths, with_reference
    from lockstep.cli.unit_flags import convert_epochs
    from lockstep.cli.workers import print_notes
    from lockstep.recipes.env_presets import AUTO, describe_choice, find_env_preset

    reference = with_preset(_recipe(recipe), None if preset == AUTO else preset, smoke)
    current = _with_settings(reference, settings)
    if preset == AUTO and isinstance(recipe, str) and (chosen := find_env_preset(with_absolute_paths(current))):
        reference = with_preset(_recipe(recipe), chosen, smoke)
        current = _with_settings(reference, settings)
        print_notes([describe_choice(chosen, current)])
    current, _ = convert_epochs(current, _default(type(current)))
    return resolve(with_reference(with_absolute_paths(current), reference), procs)


def _with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Apply settings by name. A config replaces a group."""
    for name, value in settings.items():
        if dataclasses.is_dataclass(value):
            recipe = dataclasses.replace(recipe, **{name: value})  # type: ignore[type-var]
        else:
            recipe = apply_overrides(recipe, {name: value})
    return recipe


def _default(recipe_class: type[Recipe]) -> Recipe | None:
    """Return a recipe with its default settings; None if not all of its fields have one."""
    try:
        return recipe_class()
    except TypeError:
        return None


def _train_seeds(
    recipe: Recipe,
    seeds: int,
    procs: int,
    parallel: int | None,
    callbacks: Sequence[Callback | None],
    init_from: str | Path | None,
) -> Experiment:
    """Create an experiment and train its runs."""
    from lockstep.experiment.seed_runs import create_experiment
    from lockstep.launch.device import require_gpus

    if any(callbacks):
        raise ConfigError("Callbacks are called for one run, not for several seeds.", "Remove them, or train one run.")
    make_importable(recipe, required=True)
    require_gpus(recipe.run.device, procs, recipe.run.share_gpu)
    command = f'lockstep.train("{recipe.name}", seeds={seeds}, procs={procs})'
    source = os.path.abspath(init_from) if init_from else None  # a resume may have another current directory
    experiment = Experiment(create_experiment(recipe, seeds, procs, command, source))
    experiment.resume(parallel=parallel)
    return experiment


def _as_run(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else Run(Path(run))


def _to_args(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return settings as command-line arguments, such as `run.seed=1`."""
    args = []
    for name, value in settings.items():
        args += _to_args(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}={value}"]
    return args
