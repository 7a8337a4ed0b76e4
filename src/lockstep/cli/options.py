"""From a command line to a recipe: its defaults, preset, smoke setting, yaml file, flags; each beats the last."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from lockstep.cli.flag_aliases import normalize_args
from lockstep.config import ConfigError, Recipe, apply_overrides, read_yaml, resolve_lanes

if TYPE_CHECKING:
    from lockstep.launch.rendezvous import LaunchConfig

Command = TypeVar("Command")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Where processes run, and what happens when one of them dies."""

    procs: Annotated[int | Literal["auto"], tyro.conf.arg(aliases=["-n"])] = 1
    """Processes to start on this machine. auto: one for each GPU, or one where there is none."""
    gpus: str | None = None
    """GPUs to use, such as 2,3; one process each unless --procs says otherwise."""
    max_restarts: int = 3
    """How often all processes start again from the last checkpoint when one is killed, hangs or loses its host."""
    nnodes: str = "1"
    """Hosts the run is spread over: 2, or 1:4 for any number from one to four, which may come and go."""
    rdzv_endpoint: str | None = None
    """HOST:PORT on the first host, the same on every host, where several hosts meet."""
    rdzv_id: str | None = None
    """What several hosts call this job; a run directory that it began is gone on with, not refused."""

    def fleet(self, procs: int) -> "LaunchConfig":
        """The same in the launcher's words."""
        from lockstep.launch.rendezvous import LaunchConfig, parse_nodes

        nodes = parse_nodes(self.nnodes)
        if nodes[1] > 1 and (self.rdzv_endpoint is None or self.rdzv_id is None):
            raise ConfigError(
                f"--nnodes {self.nnodes} needs a place to meet and a name for the job.",
                "Add, the same on every host: --rdzv-endpoint FIRST_HOST:29500 --rdzv-id NAME",
            )
        return LaunchConfig(procs, self.max_restarts, nodes, self.rdzv_endpoint, self.rdzv_id)


LAUNCHER_FLAGS = ("procs", "num-gpus", "world-size", "gpus", "max-restarts", "nnodes", "rdzv-endpoint", "rdzv-id")
"""Flags that are for the launcher alone, with their names in earlier tools."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(LaunchOptions):
    """How to start a recipe; what to train is in the recipe's own settings, listed by `--help` after its name."""

    recipe: tyro.conf.Positional[str]
    """A recipe's name (see the list above), or a Python file with a recipe of your own."""
    smoke: bool = False
    """Take the recipe's smallest setting: a few seconds, to see that everything works."""
    preset: str | None = None
    """One of the recipe's named variations."""
    config: Path | None = None
    """A yaml file with settings; flags beat it."""
    init_from: str | None = None
    """Start from the weights of another run: RUN or RUN@STEP."""
    autoscale: Annotated[bool, tyro.conf.arg(aliases=["--max-utilization"])] = False
    """Choose environments, horizon and batch by short probes of this machine; a larger batch is another experiment."""
    resume: str | None = None
    """Go on with this run instead (the same as `lockstep resume RUN`)."""


def parse_recipe(
    start: TrainOptions, rest: Sequence[str], prog: str, brought: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe a command line asks for; `brought` are settings that come with a model, which flags beat."""
    from lockstep.registry import find_recipe

    kind = find_recipe(start.recipe)
    words = normalize_args(rest, kind.aliases, kind.episode_length)
    recipe = kind()
    if start.preset is not None:
        if start.preset not in kind.presets:
            raise ConfigError(
                f"{start.recipe} has no preset '{start.preset}'.",
                f"It has: {', '.join(kind.presets) or 'none'}.",
            )
        recipe = apply_overrides(recipe, kind.presets[start.preset])
    if start.smoke:
        recipe = apply_overrides(recipe, kind.smoke_overrides)
    recipe = apply_overrides(recipe, brought or {})
    meant = recipe
    if start.config is not None:
        recipe = apply_overrides(recipe, read_yaml(start.config))
    recipe = apply_overrides(recipe, words.settings)
    recipe = tyro.cli(type(recipe), default=recipe, args=words.flags, prog=prog)
    return resolve(_with_reference(recipe, meant), 1 if start.procs == "auto" else start.procs)


def _with_reference(recipe: Recipe, meant: Recipe) -> Recipe:
    """The recipe, knowing for which batch its learning rate was meant, where it wants to know."""
    if getattr(recipe.algo, "reference_batch_size", 0) is None:
        return apply_overrides(recipe, {"algo.reference_batch_size": meant.algo.batch_size})
    return recipe


def parse_command(kind: type[Command], arguments: Sequence[str], verb: str) -> tuple[Command, list[str]]:
    """A verb's own flags, and the words left for the recipe it is about."""
    words = normalize_args(arguments, {})
    command, rest = tyro.cli(kind, args=words.flags, prog=f"lockstep {verb}", return_unknown_args=True)
    return command, rest + [f"{key}={value}" for key, value in words.settings.items()]


def resolve(recipe: Recipe, processes: int) -> Recipe:
    """The recipe with its lanes settled and its numbers checked, before any process starts."""
    from lockstep.lanes import partition_lanes

    run = resolve_lanes(recipe.run, processes)
    if run.total_samples < 1:
        raise ConfigError(f"run.total_samples is {run.total_samples}.", "Train for at least one sample.")
    if run.lanes is None or run.lanes < 1:
        raise ConfigError(f"run.lanes is {run.lanes}.", "A run has at least one lane.")
    if run.tf32 and run.reduction == "exact":
        raise ConfigError("run.tf32 rounds inputs, and exact reduction does not.", "Use --run.reduction fast with it.")
    if run.compile != "off" and run.reduction == "exact":
        raise ConfigError(
            f"run.compile is {run.compile}, and exact reduction runs lanes one after another as they are written.",
            "Use --run.reduction fast with it, or --run.compile off.",
        )
    partition_lanes(run.lanes, processes)
    recipe.algo.validate(recipe.task, run)
    return dataclasses.replace(recipe, run=run)  # type: ignore[type-var]


def parse_start(arguments: Sequence[str], verb: str, description: str) -> tuple[TrainOptions, list[str], list[str]]:
    """A verb's own flags, the flags left for the recipe, and sentences to print."""
    from lockstep.registry import RECIPES, find_recipe

    arguments, name = _recipe_first(arguments, RECIPES)
    wants_help = any(word in ("-h", "--help") for word in arguments)
    if wants_help and name is not None and (name in RECIPES or name.endswith(".py")):
        recipe = find_recipe(name)
        tyro.cli(recipe, default=recipe(), args=["--help"], prog=f"lockstep {verb} {name}")
    kind = find_recipe(name) if name is not None and not wants_help else Recipe
    words = normalize_args(arguments, kind.aliases, kind.episode_length)
    listing = "\n".join(f"  {recipe:12} {line}" for recipe, (_, line) in RECIPES.items())
    about = f"{description}\n\nRecipes:\n{listing}\n\nlockstep {verb} RECIPE --help lists its settings."
    start, rest = tyro.cli(
        TrainOptions, args=words.flags, prog=f"lockstep {verb}", description=about, return_unknown_args=True
    )
    return start, rest + [f"{key}={value}" for key, value in words.settings.items()], words.notes


def _recipe_first(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], str | None]:
    """The arguments with the recipe's name in front, and that name: whoever puts flags before it is understood, too."""
    bare = [place for place, word in enumerate(arguments) if not word.startswith("-") and "=" not in word]
    # A word that follows a flag may be its value: a recipe's name, or a word that follows none, is the better guess.
    named = [place for place in bare if arguments[place] in known or arguments[place].endswith(".py")]
    free = [place for place in bare if place == 0 or not arguments[place - 1].startswith("-")]
    guesses = [*(place for place in named if place in free), *named, *free, *bare]
    if not guesses:
        return list(arguments), None
    name = arguments[guesses[0]]
    return [name, *arguments[: guesses[0]], *arguments[guesses[0] + 1 :]], name


def resolve_procs(machines: LaunchOptions) -> int:
    """Make only the chosen GPUs visible; the number of processes to start."""
    gpus, procs = machines.gpus, machines.procs
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    if procs == "auto":
        from lockstep.cli.torch_import import import_torch_with_status

        import_torch_with_status()
        import torch

        return max(1, torch.cuda.device_count())
    return len(gpus.split(",")) if gpus is not None and procs == 1 else procs
