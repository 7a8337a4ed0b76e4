"""Import weights of other programs as a new run, which can be played, evaluated, resumed or used as a start."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from safetensors import SafetensorError
from torch import Tensor

from lockstep.algorithms.tdmpc2.reference_weights import is_reference
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
from lockstep.tools.export.tdmpc2_checkpoint import check_tdmpc2, from_tdmpc2

_WRAPPERS = ("module.", "_orig_mod.")
"""Name prefixes that DDP and torch.compile add."""


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Read weights (with Lockstep's names where known), settings and the recipe name from a file.

    Settings and name are empty if the file does not contain them.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.", "Give a .zip of Stable-Baselines3, a .safetensors, or a .pt.")
    if path.suffix == ".zip":
        data, parameters = read_sb3(path)
        return from_sb3(parameters, path), settings_of(data, parameters), ""
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        weights = unwrapped(read_tensors(path))
        if is_reference(weights):
            return *from_tdmpc2(weights), ""
        return weights, {}, ""
    except (ConfigError, MemoryError):
        raise
    except (OSError, UnreadableFileError, ValueError, TypeError, KeyError, SafetensorError, BadZipFile) as error:
        raise ConfigError(f"{path} has no readable weights: {first_line(error)}.", "Give a state dict.") from None


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    weights, metadata = read_safetensors(path)
    settings = parse_json(metadata.get("config", "{}"))
    if not isinstance(settings, dict) or not shallow(settings):
        raise ValueError("its config is not a JSON object with settings")
    settings = {key: value for key, value in settings.items() if key in ("task", "algo")}
    name = metadata.get("recipe", "")
    return unwrapped(weights), settings, "" if name.endswith(".py") else name  # untrusted files may not name code


def refuse_code(settings: Mapping[str, Any], args: Sequence[str], path: Path) -> None:
    """Refuse settings of a file that name a module to import. A flag given by the user may name it."""
    task = settings.get("task")
    name = task.get("id") if isinstance(task, dict) else None
    if isinstance(name, str) and ":" in name and not any(arg.lstrip("-").startswith("task.id") for arg in args):
        raise ConfigError(
            f"{path} is for the task {name[:100]!r}, which imports a module, but a file of weights may not run code.",
            f"If you trust that module, name it in a flag: --task.id {name[:100]}",
        )


def unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the name prefixes of wrappers."""
    names = dict(weights)
    for prefix in _WRAPPERS * 2:  # either may be inside the other
        if names and all(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    return names


def import_run(weights: Mapping[str, Tensor], recipe: Recipe, path: Path) -> Path:
    """Create a run of a recipe with these weights at 0 samples, load it again to compare, and return its path."""
    runtime = Runtime.single_process(recipe.run)
    with _config_errors(path):
        task: Any = recipe.task.build(runtime.lanes, runtime.device)
    with closing(task):
        with _config_errors(path):
            algorithm = recipe.algo.build(task, runtime)
        weights = check_tdmpc2(weights, algorithm, path)
        load_weights(algorithm, match_state_dict(weights, algorithm.model_state_dict(), path))
        clock = TrainState(total_samples=recipe.run.total_samples)
        with RunDir.open(recipe, runtime, False) as run:
            run.checkpoints.restore(algorithm, task, clock)  # there is no checkpoint; this claims the run directory
            run.checkpoints.chain.started_with = "imported weights"
            run.finish(algorithm, task, clock, preempted=True)
    loaded = exportable_policy(load_algorithm(run.path, recipe))
    compare(exportable_policy(algorithm), loaded.forward, recipe, tolerance=0.0)
    return Path(run.path)


@contextmanager
def _config_errors(path: Path) -> Iterator[None]:
    """Convert errors to ConfigError while a task and a network are built from untrusted settings of a file."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in str(error):
            raise
        raise ConfigError(
            f"the settings in {path} are invalid: {type(error).__name__}: {first_line(error)}.",
            "Give the task and network of the weights as flags: --task.id, --algo.encoder.hidden-sizes, ...",
        ) from error


def match_state_dict(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return weights under the agent's names. Raises ConfigError for missing, extra or differently shaped tensors."""
    if not set(weights) & set(expected):
        weights = {f"net.{name}": tensor for name, tensor in weights.items()}
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    mismatched = [
        f"{name} is {tuple(weights[name].shape)} and not {tuple(expected[name].shape)}"
        for name in expected
        if name in weights and weights[name].shape != expected[name].shape
    ]
    if missing or extra or mismatched:
        parts = [
            f"it lacks {', '.join(missing[:3])}" if missing else "",
            f"it has {', '.join(name[:100] for name in extra[:3])}" if extra else "",
            *mismatched[:3],
        ]
        raise ConfigError(
            f"{path} does not fit the recipe's network: {'; '.join(filter(None, parts))}.",
            "Give the task and network of the weights as flags: --task.id, --algo.encoder.hidden-sizes, ...",
        )
    return {name: weights[name].to(tensor.dtype) for name, tensor in expected.items()}
