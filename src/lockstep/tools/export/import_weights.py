"""Bringing a model in: weights of other programs become a run, to be played, scored, gone on with or begun from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from safetensors import SafetensorError
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe
from lockstep.distributed import Runtime
from lockstep.inference import load_algorithm
from lockstep.io.safe_read import UnreadableFileError, parse_json, shallow
from lockstep.run_dir import RunDir
from lockstep.tools.export.exportable_policy import exportable_policy
from lockstep.tools.export.formats import compare, load_weights
from lockstep.tools.export.load_state_dict import first_line, read_safetensors, read_tensors
from lockstep.tools.export.sb3 import from_sb3, read_sb3, settings_of

_WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before every name."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The weights in a file under our names as far as they are known, settings that go with them, and a recipe's name.

    Settings and name are empty where the file does not say them.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.", "Give a .zip of Stable-Baselines3, a .safetensors, or a .pt.")
    if path.suffix == ".zip":
        data, parameters = read_sb3(path)
        return from_sb3(parameters, path), settings_of(data, parameters), ""
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        return unwrapped(read_tensors(path)), {}, ""
    except (ConfigError, MemoryError):
        raise
    except (OSError, UnreadableFileError, ValueError, TypeError, KeyError, SafetensorError, BadZipFile) as error:
        raise ConfigError(
            f"{path} holds no weights that can be read: {first_line(error)}.", "Give a state dict."
        ) from None


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    weights, about = read_safetensors(path)
    settings = parse_json(about.get("config", "{}"))
    if not isinstance(settings, dict) or not shallow(settings):
        raise ValueError("its config is no object with settings")
    settings = {key: value for key, value in settings.items() if key in ("task", "algo")}
    name = about.get("recipe", "")
    return unwrapped(weights), settings, "" if name.endswith(".py") else name  # a stranger's file names no code


def refuse_code(settings: Mapping[str, Any], words: Sequence[str], path: Path) -> None:
    """Refuse settings of a file that name a module to import; a flag of the user's own may name the same one."""
    task = settings.get("task")
    name = task.get("id") if isinstance(task, dict) else None
    if isinstance(name, str) and ":" in name and not any(word.lstrip("-").startswith("task.id") for word in words):
        raise ConfigError(
            f"{path} is for the task {name[:100]!r}, which imports a module, and a file of weights runs no code.",
            f"If you trust that module, name it yourself: --task.id {name[:100]}",
        )


def unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what wrappers put before their names."""
    names = dict(weights)
    for prefix in _WRAPPERS * 2:  # either may be inside the other
        if names and all(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    return names


def import_run(weights: Mapping[str, Tensor], recipe: Recipe, path: Path) -> Path:
    """Make a run of a recipe whose agent has these weights, at 0 samples, and read it back; where it is."""
    runtime = Runtime.single_process(recipe.run)
    with _settings_of_the_file(path):
        task: Any = recipe.task.build(runtime.lanes, runtime.device)
    try:
        with _settings_of_the_file(path):
            algorithm = recipe.algo.build(task, runtime)
        load_weights(algorithm, match_state_dict(weights, algorithm.model_state_dict(), path))
        clock = TrainState(total_samples=recipe.run.total_samples)
        with RunDir.open(recipe, runtime, False) as run:
            run.checkpoints.restore(algorithm, task, clock)  # there is none: this claims the run
            run.finish(algorithm, task, clock, preempted=True)
    finally:
        task.close()
    compare(
        exportable_policy(algorithm), exportable_policy(load_algorithm(run.path, recipe)).forward, recipe, tolerance=0.0
    )
    return Path(run.path)


@contextmanager
def _settings_of_the_file(path: Path) -> Iterator[None]:
    """While a task and a network are built from settings that came with a file: they may be any."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in str(error):
            raise
        raise ConfigError(
            f"the settings that come with {path} cannot be used: {type(error).__name__}: {first_line(error)}.",
            "Give the task and the network it was made with as flags: --task.id, --algo.encoder.hidden-sizes, ...",
        ) from error


def match_state_dict(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Weights under the names that an agent has; ConfigError naming what is missing, too much or of another shape."""
    if not set(weights) & set(wanted):
        weights = {f"net.{name}": tensor for name, tensor in weights.items()}
    missing, extra = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    other = [
        f"{name} is {tuple(weights[name].shape)} and not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in weights and weights[name].shape != wanted[name].shape
    ]
    if missing or extra or other:
        parts = [
            f"it lacks {', '.join(missing[:3])}" if missing else "",
            f"it has {', '.join(name[:100] for name in extra[:3])}" if extra else "",
            *other[:3],
        ]
        raise ConfigError(
            f"{path} does not fit the recipe's network: {'; '.join(filter(None, parts))}.",
            "Give the recipe the task and the network it was made with: --task.id, --algo.encoder.hidden-sizes, ...",
        )
    return {name: weights[name].to(tensor.dtype) for name, tensor in wanted.items()}
