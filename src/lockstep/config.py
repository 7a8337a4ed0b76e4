"""Configs: frozen dataclasses, a typed overlay of plain values on them, and their form on disk."""

import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lockstep.io.printable import printable
from lockstep.io.safe_read import YAML_BYTES, UnreadableFileError, parse_yaml, read_text

NAME_BYTES = 200
"""The longest name of a run; file systems allow 255 bytes, and names of files next to the run are longer than its."""


class ConfigError(ValueError):
    """A setting that cannot be: what is wrong, and how to mend it."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem}\n{hint}" if hint else problem)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of the run itself. Every number is for the whole run, not for one process."""

    total_samples: int = 1_000_000
    """How many global samples (environment steps or examples) to train for."""
    seed: int = 0
    """The seed of everything: initialisation, environments, sampling."""
    name: str = ""
    """Name of the run directory; chosen from recipe and time when empty."""
    runs_dir: str = "runs"
    """Where run directories are made."""
    lanes: int | None = None
    """Fixed shares the run is cut into; 8, or the number of processes if that is larger."""
    reduction: Literal["fast", "exact"] = "fast"
    """fast: overlapped float reduction. exact: bit-identical on any number of processes, for proving."""
    precision: Literal["fp32", "bf16", "fp16", "amp"] = "fp32"
    """Arithmetic of the networks; amp is bf16 where the device has it, else fp16 with loss scaling."""
    grad_comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic in which gradients travel between processes (fast reduction only); bf16 halves the bytes."""
    grad_bucket_mb: float = 4.0
    """Gradients leave in buckets of about this many megabytes while backward still runs."""
    device: str = "auto"
    """auto, cpu, cuda or mps. auto: CUDA where there is a GPU, else MPS on a Mac, else the CPU."""
    share_gpu: bool = False
    """Allow several processes on one GPU, with gradients reduced over gloo: for tests and proofs, not for speed."""
    tf32: bool = False
    """Allow TF32 in matrix products and convolutions on NVIDIA GPUs: faster, with about three decimal digits
    (fast reduction only)."""
    compile: Literal["off", "on", "graphs"] = "off"
    """How updates, acting and planning run. off: as written. on: compiled by torch, after a minute or two.
    graphs: recorded as CUDA graphs, with one launch for each. For PPO, DDPG and TD-MPC2 (fast reduction only)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What bad numbers (NaN, inf) do: stop the run, or have the update or iteration that met them skipped by all."""
    log_every: int = 10_000
    """Global samples between log lines."""
    eval_every: int | None = 100_000
    """Global samples between evaluations; none for never."""
    eval_episodes: int = 32
    """Episodes of an evaluation, over all processes."""
    early_stop_patience: int | None = None
    """Stop early, after so many evaluations without a better one; none trains for all samples."""
    save_every: int | None = None
    """Global samples between checkpoints; none saves as often as takes a hundredth of the time, every 10 s at most."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = None
    """Also keep the checkpoints that cross a multiple of this many global samples."""
    replay_parity: bool = True
    """Write parity next to replay in checkpoints: 10 % more bytes, from which damaged blocks are repaired."""
    replica_check_every: int = 64
    """Updates between comparisons of all processes' parameters, optimizers and normalisers."""
    collective_timeout: float = 60.0
    """Seconds a process waits for the others before it gives up."""
    max_hours: float | None = None
    """Save and stop after so many hours, with exit code 75: what a preempted run does."""
    record_video: bool = True
    """Film each new best policy: best.gif in the run directory, and in TensorBoard's images."""
    wandb: bool = False
    """Send the log to Weights & Biases, too (extra `wandb`)."""
    wandb_project: str = "lockstep"
    """Project the run belongs to at Weights & Biases."""
    wandb_entity: str = ""
    """User or team the project belongs to at Weights & Biases; your own when empty."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: written into the run directory, to be sent later with `wandb sync`. WANDB_MODE beats it."""
    wandb_timeout: float = 30.0
    """Seconds to wait for Weights & Biases at the start and at the end; then the run goes on offline."""
    allow_other_machine: bool = False
    """Resume in exact mode although CPU capability, device or library versions differ from the checkpoint's. The bits
    may then differ from those of the uninterrupted run. Applies to one resume."""
    log_tensor_digests: bool = False
    """Log a digest of every tensor at every iteration (what `prove` reads)."""

    def __post_init__(self) -> None:
        check_text(self.name, "run.name")
        check_text(self.runs_dir, "run.runs_dir")
        check_name(self.name)


def check_text(value: str, key: str) -> None:
    """Refuse control characters, NUL and surrogates in a setting: none is part of a name, and few systems take them."""
    if not value.isprintable() and printable(value, newlines=False) != value:
        raise ConfigError(
            f"{key} is {_shown(value)}, which has characters that cannot be printed.", "Use letters, digits, - and _."
        )


def check_name(name: str) -> None:
    """Refuse a run name that is not a single directory name: a foreign config must not escape `run.runs_dir`."""
    if "/" in name or "\\" in name or name in (".", ".."):
        raise ConfigError(
            f"run.name is {_shown(name)}, which is a path and not a name.", "Give the directory with --run.runs-dir."
        )
    if (size := len(name.encode(errors="replace"))) > NAME_BYTES:
        raise ConfigError(f"run.name has {size} bytes, more than the {NAME_BYTES} it may.", "Choose a shorter name.")


def resolve_lanes(run: RunConfig, processes: int) -> RunConfig:
    """The run with its number of lanes settled: 8, or one for each process of the first start if that is more."""
    return dataclasses.replace(run, lanes=max(8, processes)) if run.lanes is None else run


class Recipe:
    """An algorithm on a task: a frozen dataclass with the fields `task`, `algo` and `run`."""

    task: Any
    algo: Any
    run: RunConfig

    name: ClassVar[str] = ""
    """What the recipe is called on the command line; for a recipe in a file of the user's, the file's path."""
    smoke_overrides: ClassVar[Mapping[str, Any]] = {}
    """Settings that make a run of a few seconds, for `train --smoke` and `prove`."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named variations, chosen by `--preset`."""
    episode_length: ClassVar[int | None] = None
    """Steps of an episode where that is fixed, so that a number of episodes can be taken for one of samples."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other words for fields, such as those of earlier tools; settings that follow the field are set along with it."""


RecipeT = TypeVar("RecipeT", bound=Recipe)


def apply_overrides(config: RecipeT, values: Mapping[str, Any]) -> RecipeT:
    """A copy of a recipe with some values replaced; keys may be nested or dotted, and unknown ones are errors."""
    for key, value in values.items():
        config = _replace(config, key.split("."), value, key)
    return config


def _replace(config: Any, path: list[str], value: Any, full: str) -> Any:
    name, rest = path[0].replace("-", "_"), path[1:]
    fields = {field.name for field in dataclasses.fields(config)}
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"It has: {', '.join(sorted(fields))}."
        raise ConfigError(f"'{full}' is not a setting: {type(config).__name__} has no '{name}'.", hint)
    current = getattr(config, name)
    if rest:
        if not dataclasses.is_dataclass(current):
            raise ConfigError(f"'{full}' is not a setting: '{name}' has no parts.", f"Set '{name}' itself.")
        changed = _replace(current, rest, value, full)
    elif dataclasses.is_dataclass(current):
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{full}' is a group of settings, not {_shown(value)}.", "Give its fields one by one.")
        changed = current
        for key, part in value.items():
            changed = _replace(changed, str(key).split("."), part, f"{full}.{key}")
    else:
        changed = coerce(value, _field_types(typing.cast(Any, type(config)))[name], full)
    return dataclasses.replace(config, **{name: changed})


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields. Evaluating annotations takes most of the time of reading a config."""
    return typing.get_type_hints(kind)


def coerce(value: Any, kind: Any, name: str) -> Any:
    """A plain value as the type its field declares: yaml reads `3e-4` as text, and lists for tuples."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, int) and value.bit_length() > 256:  # Python does not write out very long numbers
        raise ConfigError(f"'{name}' is {_shown(value)}, which is not {_wanted(kind)}.", "No setting is that large.")
    if kind is Any or (origin in (typing.Union, types.UnionType) and type(value) in arguments):
        return value
    if origin in (typing.Union, types.UnionType):
        none = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
        if none and type(None) in arguments:
            return None
        for choice in arguments:
            if choice is not type(None):
                try:
                    return coerce(value, choice, name)
                except ConfigError:
                    continue
    elif origin is Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, str) and value == str(choice)):  # a command line has only text
                return choice
    elif origin is tuple and isinstance(value, list | tuple | str | int):
        # A list, `32,64` from a command line, or a single number for a list of one.
        value = str(value).split(",") if isinstance(value, str | int) and value != "" else value
        of = arguments[0] if len(arguments) == 2 and arguments[1] is ... else None
        if of is not None or len(arguments) == len(value):
            return tuple(coerce(part, of or arguments[index], name) for index, part in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {coerce(k, arguments[0], name): coerce(v, arguments[1], name) for k, v in value.items()}
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif kind in (int, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value) if kind is float else _whole(value)
    elif kind is str and isinstance(value, str | int | float):
        text = str(value)
        check_text(text, f"'{name}'")
        return text
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ConfigError(f"'{name}' is {_shown(value)}, which is not {_wanted(kind)}.", f"Give {_wanted(kind)}.")


def _wanted(kind: Any) -> str:
    choices = " or ".join(map(str, typing.get_args(kind)))
    return choices if typing.get_origin(kind) is Literal else getattr(kind, "__name__", str(kind))


def _shown(value: Any) -> str:
    """A value as an error shows it: a stranger's may be as long as its file."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write out a number of more than 4,300 digits
        return "a number too long to show"
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"


def _whole(value: Any) -> int:
    """A whole number, also one written `1e6`; by way of a float only then, because large ones lose digits there."""
    number: int | None = None
    if isinstance(value, int | str):
        with contextlib.suppress(ValueError):
            number = int(value)
    if number is None:
        number = int(float(value))
        if number != float(value):
            raise ValueError(f"{value} is not whole")
    if number.bit_length() > 256:
        raise ValueError("no setting is that large")
    return number


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a yaml file, read with the safe loader."""
    try:
        values = parse_yaml(read_text(path, YAML_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.", "Give the path of a yaml file.") from None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Give the path of a yaml file.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not yaml: {error}", "Mend the line it names.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {type(values).__name__}, not settings.", "Write lines such as 'task: {size: 8}'."
        )
    return {str(key): value for key, value in values.items()}


def as_dict(config: Any) -> dict[str, Any]:
    """A config as plain values, ready for yaml and json."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
