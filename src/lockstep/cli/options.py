"""Command-line options and recipes. Later sources win: defaults, preset, smoke setting, yaml file, flags."""

import dataclasses
import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from lockstep.cli import COMMANDS
from lockstep.cli.flag_aliases import ALIASES, normalize_args
from lockstep.cli.parser import parse_args, parse_known_args
from lockstep.cli.unit_flags import UNIT_FLAGS, convert_epochs, convert_units
from lockstep.config import ConfigError, Recipe, apply_overrides, read_yaml, resolve_lanes, with_preset
from lockstep.recipes.env_presets import AUTO, describe_choice, find_env_preset

if TYPE_CHECKING:
    from lockstep.launch.rendezvous import LaunchConfig

Command = TypeVar("Command")


@dataclass(frozen=True, kw_only=True)
class LocalLaunchOptions:
    """Processes on this machine, and restarts after failures."""

    procs: Annotated[int | Literal["auto"] | None, tyro.conf.arg(aliases=["-n"], metavar="N|auto")] = None
    """Processes per run on this machine. auto: one per GPU, or one if there is no GPU. None: one, or one per GPU of
    --gpus."""
    gpus: Annotated[str | None, tyro.conf.arg(metavar="IDS")] = None
    """GPUs to use, such as 2,3. One process per GPU unless --procs or --seeds is given. None: all GPUs are visible."""
    max_restarts: int = 3
    """Maximum number of restarts from the last checkpoint after a process is killed, hangs or loses its host."""
    debug: Literal["off", "info", "detail"] = "off"
    """Debug level of torch.distributed and NCCL. detail: torch also checks that every collective is the same on all
    processes, which is slow. Your own TORCH_DISTRIBUTED_DEBUG and NCCL_DEBUG take precedence."""


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    """Option of commands that train one run."""

    stop_at: Annotated[int | None, tyro.conf.arg(metavar="SAMPLES")] = None
    """Save and stop at the end of the first iteration with this number of global samples. Schedules remain those of
    run.total_samples, and `lockstep resume` continues. None: train to the end."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(LocalLaunchOptions):
    """Number and location of processes, and restarts after failures."""

    nnodes: Annotated[str, tyro.conf.arg(metavar="N|MIN:MAX")] = "1"
    """Number of hosts: 2, or 1:4 for an elastic job with one to four hosts."""
    rdzv_endpoint: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Rendezvous address HOST:PORT on the first host. The same on every host. Required for several hosts."""
    rdzv_id: Annotated[str | None, tyro.conf.arg(metavar="ID")] = None
    """Job ID, the same on every host. A job that finds a run it started earlier resumes it."""

    def launch_config(self, procs: int) -> "LaunchConfig":
        """Return these options as a launcher config."""
        from lockstep.launch.rendezvous import LaunchConfig, parse_nodes

        nodes = parse_nodes(self.nnodes)
        if nodes[1] > 1 and (self.rdzv_endpoint is None or self.rdzv_id is None):
            raise ConfigError(
                f"--nnodes {self.nnodes} needs a rendezvous endpoint and a job ID.",
                "Add on every host: --rdzv-endpoint FIRST_HOST:29500 --rdzv-id NAME",
            )
        return LaunchConfig(procs, self.max_restarts, nodes, self.rdzv_endpoint, self.rdzv_id)


@dataclass(frozen=True, kw_only=True)
class ScheduledRunOptions(LaunchOptions, StopOptions):
    """Options of a run that an experiment or a sweep starts as a process."""


DEBUG_VARIABLES: dict[str, dict[str, str]] = {
    "off": {},
    "info": {"TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_DEBUG": "INFO"},
    "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO"},
}
"""Variables that `--debug` sets."""

LAUNCHER_FLAGS = (
    *("procs", "num-gpus", "nproc-per-node", "world-size", "gpus", "max-restarts"),
    *("nnodes", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port", "node-rank"),
)
"""Flags that only the launcher reads, including their aliases from other tools."""


@dataclass(frozen=True, kw_only=True)
class PresetOptions:
    """Options that choose values of a recipe."""

    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = AUTO
    """Preset of the recipe, a named set of values. auto: the preset for the environment, if there is one. none: the
    recipe's defaults."""
    smoke: bool = False
    """Use the recipe's smoke setting, which trains for a few seconds to check the installation."""

    def flags(self) -> list[str]:
        """Return the flags with which another process builds the same recipe."""
        preset = [] if self.preset == AUTO else ["--preset", self.preset or "none"]
        return [*(["--smoke"] if self.smoke else []), *preset]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(PresetOptions):
    """Options of every command that builds a recipe."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """Recipe name, or a Python file that defines a recipe."""


@dataclass(frozen=True, kw_only=True)
class StartOptions(LaunchOptions, StopOptions, PresetOptions):
    """Options that start a recipe."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """YAML file with settings. Flags take precedence."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Initial weights from another run: RUN (its best checkpoint) or RUN@SAMPLES. None: random weights."""
    autoscale: Annotated[bool, tyro.conf.arg(aliases=["--max-utilization"])] = False
    """Choose environments, rollout steps and batch size by probing this machine. A larger batch changes the results."""
    seeds: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of runs with seeds from run.seed on, in one directory: an experiment. None: one run."""
    parallel: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Runs of --seeds at a time. None: the number of GPUs, or of CPU cores without GPUs, divided by --procs."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Run directory to resume, as with `lockstep resume RUN`. Without a value: the newest run of the recipe."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(StartOptions, RecipeOptions):
    """Options that start a recipe. The settings of a recipe are listed by `lockstep train RECIPE --help`."""


def parse_recipe(
    options: RecipeOptions,
    rest: Sequence[str],
    prog: str,
    config: Path | None = None,
    imported: Mapping[str, Any] | None = None,
) -> Recipe:
    """Build the recipe of a command line. `imported` are settings stored with a model; flags take precedence.

    The result is not validated: `resolve` does that for a number of processes.
    """
    from lockstep.cli.workers import print_notes
    from lockstep.registry import find_recipe

    recipe_class = find_recipe(options.recipe)
    parsed = normalize_args(rest, recipe_class.aliases)

    def build(preset: str | None) -> tuple[Recipe, Recipe, list[str]]:
        """Return the recipe with all settings, the recipe without those of the user, and notes."""
        recipe = reference = apply_overrides(with_preset(recipe_class(), preset, options.smoke), imported or {})
        if config is not None:
            recipe = apply_overrides(recipe, read_yaml(config))
        recipe = apply_overrides(recipe, parsed.settings)
        _refuse_unknown(parsed.flags, recipe)
        recipe, notes = convert_units(parse_args(type(recipe), parsed.flags, prog, recipe), parsed.unit_flags)
        return recipe, reference, notes

    automatic = options.preset == AUTO
    recipe, reference, notes = build(None if automatic else options.preset)
    # The environment is known only now. An imported model has its own settings, which a preset could contradict.
    if automatic and imported is None and (preset := find_env_preset(with_absolute_paths(recipe))):
        recipe, reference, notes = build(preset)
        notes.append(describe_choice(preset, recipe))
    recipe, epoch_notes = convert_epochs(recipe, recipe_class())
    print_notes([*notes, *epoch_notes])
    return with_reference(with_absolute_paths(recipe), reference)


def _refuse_unknown(flags: Sequence[str], recipe: Recipe) -> None:
    """Raise ConfigError for a flag without a dot that is no field, with the nearest accepted name.

    The parser does not know the names of other tools, so it could not suggest them.
    """
    fields = [name.replace("_", "-") for name in vars(recipe)]
    options = [option.name.replace("_", "-") for option in dataclasses.fields(TrainOptions)]
    for flag in flags:
        name = flag.removeprefix("--")
        if name == flag or "." in name or name in ("help", *fields) or name.removeprefix("no-") in fields:
            continue
        matches = difflib.get_close_matches(name, [*ALIASES, *recipe.aliases, *UNIT_FLAGS, *fields, *options], n=1)
        hint = f"Did you mean --{matches[0]}?" if matches else f"See lockstep train {recipe.name} --help."
        raise ConfigError(f"there is no flag {flag}.", hint)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Resolve the files that a task or an algorithm names, if any, so that workers and later commands find them."""
    for name in ("task", "algo"):
        part = getattr(recipe, name)
        if hasattr(part, "with_absolute_paths"):
            recipe = dataclasses.replace(recipe, **{name: part.with_absolute_paths()})  # type: ignore[type-var]
    return recipe


def with_reference(recipe: Recipe, reference: Recipe) -> Recipe:
    """Set `algo.reference_batch_size`, the batch size that the learning rate was tuned for, if it is unset."""
    if getattr(recipe.algo, "reference_batch_size", 0) is None:
        return apply_overrides(recipe, {"algo.reference_batch_size": reference.algo.batch_size})
    return recipe


def parse_command(command_class: type[Command], arguments: Sequence[str], name: str) -> tuple[Command, list[str]]:
    """Parse the flags of a command. Return it and the remaining arguments, which are for the recipe."""
    parsed = normalize_args(arguments, {})
    command, unknown = parse_known_args(command_class, parsed.flags, f"lockstep {name}")
    return command, parsed.rest(unknown)


def resolve(recipe: Recipe, processes: int) -> Recipe:
    """Set the number of lanes and validate the recipe before any process starts."""
    from lockstep.lanes import partition_lanes

    run = resolve_lanes(recipe.run, processes)
    if run.total_samples < 1:
        raise ConfigError(f"run.total_samples is {run.total_samples}.", "Set it to at least 1.")
    if run.lanes is None or run.lanes < 1:
        raise ConfigError(f"run.lanes is {run.lanes}.", "Set it to at least 1.")
    if run.tf32 and run.reduction == "exact":
        raise ConfigError(
            "run.tf32 is not supported by exact reduction.", "Use --run.reduction fast, or unset run.tf32."
        )
    if run.compile != "off" and run.reduction == "exact":
        raise ConfigError(
            f"run.compile is {run.compile}, which is not supported by exact reduction.",
            "Use --run.reduction fast, or --run.compile off.",
        )
    partition_lanes(run.lanes, processes)
    if (algorithm := getattr(recipe.algo, "owner", None)) is not None:
        algorithm.require_methods()
    task = recipe.task.for_lanes(run.lanes) if hasattr(recipe.task, "for_lanes") else recipe.task
    recipe.algo.validate(task, run)
    return dataclasses.replace(recipe, task=task, run=run)  # type: ignore[type-var]


def parse_train(arguments: Sequence[str]) -> tuple[TrainOptions, list[str], list[str]]:
    """Parse the arguments of `lockstep train`. Return options, remaining arguments and notes to print."""
    from lockstep.cli.torch_import import import_torch_with_status
    from lockstep.registry import RECIPES, find_recipe, recipe_module

    arguments, name = _recipe_first(arguments, RECIPES)
    wants_help = any(arg in ("-h", "--help") for arg in arguments)
    if name in RECIPES:  # recipes import torch
        import_torch_with_status("lockstep.training_loop", recipe_module(name))
    elif name is not None and name.endswith(".py"):
        import_torch_with_status("lockstep.training_loop")
    if wants_help and name is not None and (name in RECIPES or name.endswith(".py")):
        from lockstep.cli.recipe_help import print_recipe_help

        print_recipe_help(name, find_recipe(name))
    recipe_class = find_recipe(name) if name is not None and not wants_help else Recipe
    parsed = normalize_args(arguments, recipe_class.aliases)
    listing = "\n".join(f"  {recipe:12} {line}" for recipe, line in RECIPES.items())
    description = f"{COMMANDS['train']}\n\nRecipes:\n{listing}\n\nlockstep train RECIPE --help lists its settings."
    options, unknown = parse_known_args(TrainOptions, parsed.flags, "lockstep train", description)
    return options, parsed.rest(unknown), parsed.notes


def _recipe_first(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], str | None]:
    """Move the recipe name to the front of the arguments. Return them and the name. Flags may precede the name."""
    positional = [index for index, arg in enumerate(arguments) if not arg.startswith("-") and "=" not in arg]
    # An argument after a flag may be its value. Prefer known recipe names and arguments that do not follow a flag.
    named = [index for index in positional if arguments[index] in known or arguments[index].endswith(".py")]
    not_after_flag = [index for index in positional if index == 0 or not arguments[index - 1].startswith("-")]
    candidates = [*(index for index in named if index in not_after_flag), *named, *not_after_flag, *positional]
    if not candidates:
        return list(arguments), None
    name = arguments[candidates[0]]
    return [name, *arguments[: candidates[0]], *arguments[candidates[0] + 1 :]], name


def resolve_procs(options: LocalLaunchOptions) -> int:
    """Set the variables of visible GPUs and debug messages. Return the number of processes to start."""
    gpus, procs = options.gpus, options.procs
    for variable, value in DEBUG_VARIABLES[options.debug].items():
        os.environ.setdefault(variable, value)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if procs == "auto":
        from lockstep.cli.torch_import import import_torch_with_status

        import_torch_with_status()
        import torch

        return max(1, torch.cuda.device_count())
    if procs is None:
        return 1 if gpus is None else len(gpus.split(","))
    return procs
