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
    from lockstep.cli.options import TrainOptions, parse_command, parse_recipe

    command, rest = parse_command(Import, arguments, "import")

    from lockstep.config import ConfigError
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.export.import_weights import import_run, read_weights, refuse_code
    from lockstep.tools.export.resource_limits import bounded

    console = PrintableConsole(soft_wrap=True)
    if not command.file.is_file():
        raise ConfigError(f"there is no file {command.file}.", "Give a .zip of SB3, a .safetensors, or a .pt.")
    with bounded(command.file), console.status(f"reading {command.file}"):
        weights, settings, known = read_weights(command.file)
        refuse_code(settings, rest, command.file)
        name = command.recipe or known
        if not name:
            raise ConfigError(f"{command.file} does not say which recipe it is for.", "Add --recipe gym-ppo, say.")
        start = TrainOptions(recipe=name, preset=command.preset)
        recipe = parse_recipe(start, rest, f"lockstep import {command.file}", settings)
        path = import_run(weights, recipe, command.file)
    console.print(f"{len(weights)} tensors of {command.file} are now {path}")
    console.print(f"  score it   lockstep eval {path}")
    console.print(f"  go on      lockstep resume {path}")
    console.print(f"  begin      lockstep train {name} --init-from {path}")
    return 0
