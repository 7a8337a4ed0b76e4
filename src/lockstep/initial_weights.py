"""Initial weights of a run from a checkpoint of another run (`--init-from`)."""

from pathlib import Path

import torch

from lockstep.base import Algorithm, VecEnv
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find, find_best
from lockstep.config import ConfigError, Recipe, setting_differences
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, TASK
from lockstep.protocols import StateDict
from lockstep.pytree import load_into
from lockstep.run_dir import read_config, read_task_spec
from lockstep.task_spec import InvalidSpecError, TaskSpec, same_form

UNRELATED = ("task.num_envs", "task.num_workers")
"""Settings of a task that do not change what an agent sees or does."""
MAX_NOTES = 5


def load_weights(source: str, recipe: Recipe, algorithm: Algorithm, task: VecEnv, runtime: Runtime) -> list[str]:
    """Load the weights of another run, `RUN` (its best checkpoint) or `RUN@SAMPLES`. Nothing else is loaded.

    Returns:
        Messages for the user: what was loaded and what was not, and how the tasks differ.

    Raises:
        ConfigError: There is no such checkpoint, or spaces or networks do not match.
    """
    path, at = split_source(source)
    name, notes, differences = runtime.run_on_main(lambda: _choose(path, at, recipe, task))
    with form.user_facing_errors(path / CHECKPOINTS / name):
        saved = form.strip_prefix(form.read_shared(path / CHECKPOINTS / name), "algorithm")
    weights = algorithm.model_state_dict()
    try:
        load_into(weights, {key: saved[key] for key in weights if key in saved}, f"the agent in {source}")
    except ValueError as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(
            f"the weights of {source} do not fit this network: {problem}",
            "\n".join(differences) or f"Use the recipe and the network settings of {path}.",
        ) from None
    return [_loaded(f"{path}, checkpoint {name}", weights, saved), *notes]


def split_source(source: str) -> tuple[Path, int | None]:
    """Split `RUN@SAMPLES` into the run and the samples of its checkpoint. None: no samples are given."""
    run, _, samples = source.partition("@")
    if samples and not (samples.isdecimal() and samples.isascii()):
        raise ConfigError(
            f"{source} asks for the checkpoint at {samples!r}.", "Give RUN@SAMPLES with a number of samples."
        )
    return Path(run), int(samples) if samples else None


def _choose(run: Path, at: int | None, recipe: Recipe, task: VecEnv) -> tuple[str, list[str], list[str]]:
    """Return a checkpoint of a run, messages about it and its task, and the differences of the networks."""
    directory = run / CHECKPOINTS
    name, notes = find_best(directory, form.verify_weights) if at is None else find(directory, at, form.verify_weights)
    if name is None:
        raise ConfigError(f"{run} has no checkpoint to start from.", "Give a run directory, or RUN@SAMPLES.")
    _check_spaces(run, task)
    if not (run / CONFIG).is_file():  # only checkpoints were copied
        return str(name), notes, []
    differences = setting_differences(read_config(run)[1], recipe)
    texts = {
        key: f"{key} is {now!r} here and {before!r} in {run}."
        for key, (before, now) in differences.items()
        if key not in UNRELATED
    }
    notes += [text for key, text in texts.items() if key.startswith("task.")][:MAX_NOTES]
    networks = [text for key, text in texts.items() if key.startswith("algo.")]
    return str(name), notes, networks[:MAX_NOTES]


def _check_spaces(run: Path, task: VecEnv) -> None:
    """Raise ConfigError if the spaces of a run's task, where they are known, have another form than those here."""
    values = read_task_spec(run)
    if values is None or not hasattr(task, "observation_space"):
        return
    try:
        spec = TaskSpec(values, 1, torch.device("cpu"))
    except InvalidSpecError as error:
        raise ConfigError(f"{run / TASK} is not valid: {error}.", "Remove the file to skip the check.") from None
    for name in ("observation_space", "action_space"):
        before, now = getattr(spec, name), getattr(task, name)
        if not same_form(before, now):
            raise ConfigError(
                f"the {name.replace('_', ' ')} of {run} is {before}, but that of this task is {now}.",
                f"Use a task with the spaces of {run}, or train without --init-from.",
            )


def _loaded(source: str, weights: StateDict, saved: StateDict) -> str:
    """Return the message about what was loaded."""
    rest = sorted({key.partition(".")[0] for key in saved.keys() - weights.keys()})
    parameters = sum(tensor.numel() for tensor in weights.values())
    return (
        f"Initial weights: {source}, {len(weights)} tensors with {parameters:,} values. "
        f"Not loaded: {', '.join([*rest, 'training state', 'environments'])}."
    )
