"""Configs: frozen dataclasses, typed overrides from plain values, and yaml files."""

import contextlib
import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lockstep.io.printable import printable
from lockstep.io.safe_read import YAML_BYTES, UnreadableFileError, parse_yaml, read_text

NAME_BYTES = 200
"""Maximum length of a run name. File systems allow 255 bytes, and some file names extend the run name."""


class ConfigError(ValueError):
    """Invalid setting. The message says what is wrong and how to fix it."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem}\n{hint}" if hint else problem)


DEFAULT_EVAL_EPISODES = 32
"""Episodes of a complete evaluation if `run.eval_episodes` is None."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of the run. Every number is for the whole run, not per process."""

    total_samples: int = 1_000_000
    """Global samples (environment steps or examples) to train for, rounded up to whole iterations."""
    seed: int = 0
    """Seed of initialization, environments and sampling."""
    name: str = ""
    """Name of the run directory. Empty: recipe, environment and time."""
    runs_dir: str = "runs"
    """Parent directory of run directories."""
    lanes: int | None = None
    """Number of fixed shares of the run (lanes). None: 8, or the number of processes if that is larger."""
    reduction: Literal["fast", "exact"] = "fast"
    """Reduction of gradients. fast: overlapped float all-reduce. exact: bit-identical on any number of processes."""
    precision: Literal["fp32", "bf16", "fp16", "amp"] = "fp32"
    """Precision of the networks. amp: bf16 if the device supports it, else fp16 with loss scaling."""
    grad_comm_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype used to all-reduce gradients (fast reduction only). bf16 halves the bytes."""
    grad_bucket_mb: float = 4.0
    """Approximate size in megabytes of gradient buckets, which are reduced during backward."""
    device: str = "auto"
    """auto, cpu, cuda or mps. auto: CUDA if available, else MPS, else the CPU."""
    share_gpu: bool = False
    """Allow several processes per GPU, with gradients reduced over gloo. For tests and proofs, not for speed."""
    tf32: bool = False
    """Allow TF32 matrix products and convolutions on NVIDIA GPUs: faster, with about three decimal digits
    (fast reduction only)."""
    compile: Literal["off", "on", "graphs"] = "off"
    """Execution of updates, acting and planning. off: eager. on: torch.compile, which takes a minute or two at startup.
    graphs: CUDA graphs, one launch each. For PPO, DDPG, SAC and TD-MPC2 (fast reduction only)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Response to non-finite values (NaN, inf): stop the run, or skip the update or iteration on all processes."""
    log_every: int = 10_000
    """Global samples between log lines."""
    eval_every: int | None = 100_000
    """Global samples between evaluations. None: no evaluations."""
    eval_episodes: int | None = None
    """Episodes per evaluation, over all processes. None: up to 32 and at least one per lane, as many as fit into 5 % of
    run.eval_every in environment steps (40 % for DDPG and SAC, whose updates take longer than steps; half of it,
    relative to run.total_samples, in the last evaluation). Evaluations are rarer if one episode per lane may take
    longer."""
    early_stop_patience: int | None = None
    """Stop after this number of evaluations without a new best. None: train for all samples."""
    save_every: int | None = None
    """Global samples between checkpoints. None: save automatically, at most 1 % of run time and every 10 s."""
    keep_last: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Global samples between checkpoints that are kept permanently. None: only the newest and the best."""
    replay_parity: bool = True
    """Write parity data for replay checkpoints, to repair damaged blocks. Adds 10 % to their size."""
    replica_check_every: int = 64
    """Updates between checks that parameters, optimizers and normalizers are equal on all processes."""
    collective_timeout: float = 60.0
    """Timeout of collectives in seconds. The run is aborted after it."""
    max_hours: float | None = None
    """Save and stop after this many hours, with exit code 75, like a preempted run. None: no limit."""
    record_video: bool = True
    """Record a video of each new best policy: best.gif in the run directory, and TensorBoard images."""
    wandb: bool = False
    """Also log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "lockstep"
    """Weights & Biases project."""
    wandb_entity: str = ""
    """Weights & Biases user or team. Empty: the default entity of the account."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: write to the run directory, for `wandb sync` later. WANDB_MODE takes precedence."""
    wandb_timeout: float = 30.0
    """Seconds to wait for Weights & Biases at start and end. After that, the run continues offline."""
    allow_other_machine: bool = False
    """Allow a resume with exact reduction if CPU capability, device or library versions differ from the checkpoint.
    Results may then differ from those of the uninterrupted run. Applies to one resume."""
    digest_every: int | None = 1_000
    """Global samples between digests of agent and metrics in digests.jsonl, which show where two runs differ. None: no
    digests."""
    log_tensor_digests: bool = False
    """Log a digest of every tensor at every iteration. `lockstep prove` reads them."""

    def __post_init__(self) -> None:
        check_text(self.name, "run.name")
        check_text(self.runs_dir, "run.runs_dir")
        # The name must be that of one directory: an untrusted config must not escape `run.runs_dir`.
        if "/" in self.name or "\\" in self.name or self.name in (".", ".."):
            raise ConfigError(
                f"run.name is {_repr(self.name)}, which is a path and not a name.",
                "Set the directory with --run.runs-dir.",
            )
        if (size := len(self.name.encode(errors="replace"))) > NAME_BYTES:
            raise ConfigError(
                f"run.name has {size} bytes, more than the maximum of {NAME_BYTES}.", "Choose a shorter name."
            )


def check_text(value: str, key: str) -> None:
    """Reject control characters, NUL and surrogates in a setting: they are not valid in names."""
    if not value.isprintable() and printable(value, newlines=False) != value:
        raise ConfigError(
            f"{key} is {_repr(value)}, which contains unprintable characters.", "Use letters, digits, - and _."
        )


def resolve_lanes(run: RunConfig, processes: int) -> RunConfig:
    """Set the number of lanes if it is None: 8, or the number of processes of the first start if that is larger."""
    return dataclasses.replace(run, lanes=max(8, processes)) if run.lanes is None else run


class Recipe:
    """An algorithm on a task: a frozen dataclass with the fields `task`, `algo` and `run`."""

    task: Any
    algo: Any
    run: RunConfig

    name: ClassVar[str] = ""
    """Name of the recipe on the command line. For a recipe in a user's file: the path of the file."""
    smoke_overrides: ClassVar[Mapping[str, Any]] = {}
    """Settings for a run of a few seconds, for `train --smoke` and `prove`."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of values, selected by `--preset`."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Alternative flag names for fields, such as those of other tools."""


RecipeT = TypeVar("RecipeT", bound=Recipe)


def apply_overrides(config: RecipeT, values: Mapping[str, Any]) -> RecipeT:
    """Return a copy of a recipe with some values replaced. Keys may be nested or dotted. Unknown keys are errors."""
    for key, value in values.items():
        config = _replace(config, key.split("."), value, key)
    return config


def with_preset(recipe: RecipeT, preset: str | None, smoke: bool) -> RecipeT:
    """Apply a preset (None or "none": no preset), and then the smoke setting, to a recipe."""
    if preset is not None and preset.lower() != "none":
        if preset not in recipe.presets:
            available = ", ".join(recipe.presets) or "none"
            name = recipe.name or type(recipe).__name__
            raise ConfigError(f"{name} has no preset '{preset}'.", f"It has: {available}.")
        recipe = apply_overrides(recipe, recipe.presets[preset])
    if smoke:
        recipe = apply_overrides(recipe, {"run.record_video": False, **recipe.smoke_overrides})
    return recipe


def _replace(config: Any, path: list[str], value: Any, full_key: str) -> Any:
    name, rest = path[0].replace("-", "_"), path[1:]
    fields = {field.name for field in dataclasses.fields(config)}
    if name not in fields:
        matches = difflib.get_close_matches(name, fields, n=1)
        hint = f"Did you mean '{matches[0]}'?" if matches else f"It has: {', '.join(sorted(fields))}."
        raise ConfigError(f"'{full_key}' is not a setting: {type(config).__name__} has no '{name}'.", hint)
    current = getattr(config, name)
    if rest:
        if not dataclasses.is_dataclass(current):
            entry = ".".join(rest)
            fix = f"Set '{name}' itself."
            if isinstance(current, Mapping):
                fix = f"Use --{full_key.removesuffix(f'.{entry}')} {entry.replace('-', '_')} VALUE."
            raise ConfigError(f"'{full_key}' is not a setting: '{name}' has no fields.", fix)
        changed = _replace(current, rest, value, full_key)
    elif dataclasses.is_dataclass(current):
        if not isinstance(value, Mapping):
            raise ConfigError(f"'{full_key}' is a group of settings, not {_repr(value)}.", "Set its fields one by one.")
        changed = current
        for key, field_value in value.items():
            changed = _replace(changed, str(key).split("."), field_value, f"{full_key}.{key}")
    else:
        changed = coerce(value, _field_types(typing.cast(Any, type(config)))[name], full_key)
    return dataclasses.replace(config, **{name: changed})


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return the field types of a dataclass. Cached, because evaluating annotations dominates reading a config."""
    return typing.get_type_hints(kind)


def coerce(value: Any, kind: Any, name: str) -> Any:
    """Convert a plain value to the declared type of its field: yaml reads `3e-4` as text and tuples as lists."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, int) and value.bit_length() > 256:  # Python cannot print very long integers
        raise ConfigError(f"'{name}' is {_repr(value)}, which is not {_type_name(kind)}.", "Use a smaller number.")
    if kind is Any or (origin in (typing.Union, types.UnionType) and type(value) in arguments):
        return value
    if origin in (typing.Union, types.UnionType):
        is_none = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
        if is_none and type(None) in arguments:
            return None
        for choice in arguments:
            if choice is not type(None):
                try:
                    return coerce(value, choice, name)
                except ConfigError:
                    continue
    elif origin is Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, str) and value == str(choice)):  # command-line values are text
                return choice
    elif origin is tuple and isinstance(value, list | tuple | str | int):
        # A list, `32,64` from a command line, or one number for a list of one element.
        value = str(value).split(",") if isinstance(value, str | int) and value != "" else value
        element_type = arguments[0] if len(arguments) == 2 and arguments[1] is ... else None
        if element_type is not None or len(arguments) == len(value):
            return tuple(coerce(element, element_type or arguments[index], name) for index, element in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {coerce(k, arguments[0], name): coerce(v, arguments[1], name) for k, v in value.items()}
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif kind in (int, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value) if kind is float else to_int(value)
    elif kind is str and isinstance(value, str | int | float):
        text = str(value)
        check_text(text, f"'{name}'")
        return text
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    if origin is dict:
        raise ConfigError(f"'{name}' is {_repr(value)}, not names with values.", f"Give them: --{name} NAME VALUE.")
    raise ConfigError(f"'{name}' is {_repr(value)}, which is not {_type_name(kind)}.", f"Give {_type_name(kind)}.")


def _type_name(kind: Any) -> str:
    choices = " or ".join(map(str, typing.get_args(kind)))
    return choices if typing.get_origin(kind) is Literal else getattr(kind, "__name__", str(kind))


def _repr(value: Any) -> str:
    """Format a value for an error message, truncated because untrusted values may be very long."""
    try:
        text = repr(value)
    except ValueError:  # Python cannot print integers of more than 4,300 digits
        return "a number too long to show"
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"


def to_int(value: Any) -> int:
    """Convert to an integer. Only values such as `1e6` go through a float, which would round large integers."""
    number: int | None = None
    if isinstance(value, int | str):
        with contextlib.suppress(ValueError):
            number = int(value)
    if number is None:
        if not float(value).is_integer():  # also infinity
            raise ValueError(f"{value} is not whole")
        number = int(float(value))
    if number.bit_length() > 256:
        raise ValueError("the number is too large")
    return number


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a yaml file, read with the safe loader."""
    try:
        values = parse_yaml(read_text(path, YAML_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.", "Use the path of a yaml file.") from None
    except UnreadableFileError as error:
        raise ConfigError(f"{error}.", "Use the path of a yaml file.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid yaml: {error}", "Fix the line named above.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} contains {type(values).__name__}, not settings.", "Write lines such as 'task: {size: 8}'."
        )
    return {str(key): value for key, value in values.items()}


def as_dict(config: Any) -> dict[str, Any]:
    """Return a config as plain values for yaml and json."""
    return dataclasses.asdict(config)


def setting_differences(before: Mapping[str, Any], now: Any) -> dict[str, list[Any]]:
    """Return settings that a stored config and a recipe both have with other values: [before, now] by dotted name."""
    old = flat_settings(before)
    new = flat_settings(json.loads(json.dumps(as_dict(now))))  # tuples become lists, as in the stored config
    return {key: [old[key], value] for key, value in new.items() if key in old and old[key] != value}


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flat_settings(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return flat
