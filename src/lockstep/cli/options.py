"""Command-line options and recipes. Later sources win: defaults, preset, smoke setting, yaml file, flags."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from lockstep.cli import COMMANDS
from lockstep.cli.flag_aliases import normalize_args
from lockstep.config import ConfigError, Recipe, apply_overrides, read_yaml, resolve_lanes

if TYPE_CHECKING:
    from lockstep.launch.rendezvous import LaunchConfig

Command = TypeVar("Command")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Number and location of processes, and restarts after failures."""

    procs: Annotated[int | Literal["auto"], tyro.conf.arg(aliases=["-n"])] = 1
    """Processes to start on this machine. auto: one per GPU, or one if there is no GPU."""
    gpus: str | None = None
    """GPUs to use, such as 2,3. One process per GPU unless --procs is given. None: all GPUs are visible."""
    max_restarts: int = 3
    """Maximum number of restarts from the last checkpoint after a process is killed, hangs or loses its host."""
    nnodes: str = "1"
    """Number of hosts: 2, or 1:4 for an elastic job with one to four hosts."""
    rdzv_endpoint: str | None = None
    """Rendezvous address HOST:PORT on the first host. The same on every host. Required for several hosts."""
    rdzv_id: str | None = None
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


LAUNCHER_FLAGS = ("procs", "num-gpus", "world-size", "gpus", "max-restarts", "nnodes", "rdzv-endpoint", "rdzv-id")
"""Flags that only the launcher reads, including their aliases from other tools."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options of every command that builds a recipe."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """Recipe name, or a Python file that defines a recipe."""
    preset: str | None = None
    """Preset of the recipe, a named set of values. None: the defaults."""
    smoke: bool = False
    """Use the recipe's smoke setting, which trains for a few seconds to check the installation."""

    def flags(self) -> list[str]:
        """Return the flags with which another process builds the same recipe."""
        return [*(["--smoke"] if self.smoke else []), *(["--preset", self.preset] if self.preset else [])]


@dataclass(frozen=True, kw_only=True)
class TrainOptions(LaunchOptions, RecipeOptions):
    """Options that start a recipe. The settings of a recipe are listed by `lockstep train RECIPE --help`."""

    config: Path | None = None
    """YAML file with settings. Flags take precedence."""
    init_from: str | None = None
    """Initial weights from another run: RUN or RUN@SAMPLES. None: random weights."""
    autoscale: Annotated[bool, tyro.conf.arg(aliases=["--max-utilization"])] = False
    """Choose environments, rollout steps and batch size by probing this machine. A larger batch changes the results."""
    resume: str | None = None
    """Run directory to resume, as with `lockstep resume RUN`."""


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
    from lockstep.registry import find_recipe

    recipe_class = find_recipe(options.recipe)
    parsed = normalize_args(rest, recipe_class.aliases, recipe_class.episode_length)
    recipe = reference = apply_overrides(with_preset(recipe_class(), options.preset, options.smoke), imported or {})
    if config is not None:
        recipe = apply_overrides(recipe, read_yaml(config))
    recipe = apply_overrides(recipe, parsed.settings)
    parsed_recipe = tyro.cli(type(recipe), default=recipe, args=parsed.flags, prog=prog)
    return with_reference(with_absolute_paths(parsed_recipe), reference)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Resolve the file of code that a task names, if any, so that workers and later commands find it."""
    if not hasattr(recipe.task, "with_absolute_paths"):
        return recipe
    return dataclasses.replace(recipe, task=recipe.task.with_absolute_paths())  # type: ignore[type-var]


def with_preset(recipe: Recipe, preset: str | None, smoke: bool) -> Recipe:
    """Apply a preset, and then the smoke setting, to a recipe."""
    if preset is not None:
        if preset not in recipe.presets:
            available = ", ".join(recipe.presets) or "none"
            name = recipe.name or type(recipe).__name__
            raise ConfigError(f"{name} has no preset '{preset}'.", f"It has: {available}.")
        recipe = apply_overrides(recipe, recipe.presets[preset])
    if smoke:
        recipe = apply_overrides(recipe, {"run.record_video": False, **recipe.smoke_overrides})
    return recipe


def with_reference(recipe: Recipe, reference: Recipe) -> Recipe:
    """Set `algo.reference_batch_size`, the batch size that the learning rate was tuned for, if it is unset."""
    if getattr(recipe.algo, "reference_batch_size", 0) is None:
        return apply_overrides(recipe, {"algo.reference_batch_size": reference.algo.batch_size})
    return recipe


def parse_command(command_class: type[Command], arguments: Sequence[str], name: str) -> tuple[Command, list[str]]:
    """Parse the flags of a command. Return it and the remaining arguments, which are for the recipe."""
    parsed = normalize_args(arguments, {})
    command, rest = tyro.cli(command_class, args=parsed.flags, prog=f"lockstep {name}", return_unknown_args=True)
    return command, rest + [f"{key}={value}" for key, value in parsed.settings.items()]


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
    recipe.algo.validate(recipe.task, run)
    return dataclasses.replace(recipe, run=run)  # type: ignore[type-var]


def parse_train(arguments: Sequence[str]) -> tuple[TrainOptions, list[str], list[str]]:
    """Parse the arguments of `lockstep train`. Return options, remaining arguments and notes to print."""
    from lockstep.registry import RECIPES, find_recipe

    arguments, name = _recipe_first(arguments, RECIPES)
    wants_help = any(arg in ("-h", "--help") for arg in arguments)
    if wants_help and name is not None and (name in RECIPES or name.endswith(".py")):
        recipe = find_recipe(name)
        tyro.cli(recipe, default=recipe(), args=["--help"], prog=f"lockstep train {name}")
    recipe_class = find_recipe(name) if name is not None and not wants_help else Recipe
    parsed = normalize_args(arguments, recipe_class.aliases, recipe_class.episode_length)
    listing = "\n".join(f"  {recipe:12} {line}" for recipe, line in RECIPES.items())
    description = f"{COMMANDS['train']}\n\nRecipes:\n{listing}\n\nlockstep train RECIPE --help lists its settings."
    options, rest = tyro.cli(
        TrainOptions, args=parsed.flags, prog="lockstep train", description=description, return_unknown_args=True
    )
    return options, rest + [f"{key}={value}" for key, value in parsed.settings.items()], parsed.notes


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


def resolve_procs(options: LaunchOptions) -> int:
    """Restrict visible GPUs to the chosen ones. Return the number of processes to start."""
    gpus, procs = options.gpus, options.procs
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if procs == "auto":
        from lockstep.cli.torch_import import import_torch_with_status

        import_torch_with_status()
        import torch

        return max(1, torch.cuda.device_count())
    return len(gpus.split(",")) if gpus is not None and procs == 1 else procs
