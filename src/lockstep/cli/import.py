"""`lockstep import FILE`: weights of another program become a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Import:
    """Make a run out of a model: of Stable-Baselines3's PPO (.zip), of `lockstep export` (.safetensors), or of a state
    dict (.pt, .pth, .safetensors), with or without `module.` before its names.

    Settings of the recipe may follow, as with `train`. Nothing in the file is run: of a pickle, only tensors are read.
    """

    file: tyro.conf.Positional[Path]
    """The file."""
    recipe: str | None = None
    """The recipe the model is for; a file of `lockstep export` knows its own."""
    preset: str | None = None
    """One of the recipe's named variations."""


def run(arguments: Sequence[str]) -> int:
    from lockstep.cli.options import Start, parse_recipe, parse_verb

    command, rest = parse_verb(Import, arguments, "import")

    from lockstep.config import ConfigError
    from lockstep.console import Console
    from lockstep.export.bringing import bring_in, read_weights, refuse_code
    from lockstep.export.limits import bounded

    console = Console(soft_wrap=True)
    if not command.file.is_file():
        raise ConfigError(f"there is no file {command.file}.", "Give a .zip of SB3, a .safetensors, or a .pt.")
    with bounded(command.file), console.status(f"reading {command.file}"):
        weights, settings, known = read_weights(command.file)
        refuse_code(settings, rest, command.file)
        name = command.recipe or known
        if not name:
            raise ConfigError(f"{command.file} does not say which recipe it is for.", "Add --recipe gym-ppo, say.")
        start = Start(recipe=name, preset=command.preset)
        recipe = parse_recipe(start, rest, f"lockstep import {command.file}", settings)
        path = bring_in(weights, recipe, command.file)
    console.print(f"{len(weights)} tensors of {command.file} are now {path}")
    console.print(f"  score it   lockstep eval {path}")
    console.print(f"  go on      lockstep resume {path}")
    console.print(f"  begin      lockstep train {name} --init-from {path}")
    return 0
