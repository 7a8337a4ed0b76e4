"""`lockstep import FILE`: import weights of another program as a new run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class Import:
    """Import weights as a new run: a PPO model of Stable-Baselines3 (.zip), a `lockstep export` (.safetensors), a
    checkpoint of the authors' TD-MPC2 (.pt), or a state dict (.pt, .pth, .safetensors), with or without the prefix
    `module.`.

    Accepts settings of the recipe, as `train` does. No code in the file is executed: only tensors are read.
    """

    file: tyro.conf.Positional[Path]
    """Model file."""
    recipe: str | None = None
    """Recipe of the model. None: the recipe stored in the file, which only files of `lockstep export` have."""
    preset: str | None = None
    """Preset of the recipe, a named set of values. None: the defaults."""


def run(arguments: Sequence[str]) -> int:
    from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve

    command, rest = parse_command(Import, arguments, "import")

    from lockstep.config import ConfigError
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.registry import find_recipe
    from lockstep.tools.export.import_weights import import_run, read_weights, refuse_code
    from lockstep.tools.export.resource_limits import bounded
    from lockstep.tools.export.tdmpc2_checkpoint import settings_for

    console = PrintableConsole(soft_wrap=True)
    if not command.file.is_file():
        raise ConfigError(f"there is no file {command.file}.", "Use a .zip of SB3, a .safetensors or a .pt file.")
    with bounded(command.file), console.status(f"reading {command.file}"):
        weights, settings, stored_recipe = read_weights(command.file)
        refuse_code(settings, rest, command.file)
        name = command.recipe or stored_recipe
        if not name:
            raise ConfigError(
                f"{command.file} does not name its recipe.", "Add --recipe, for example --recipe gym-ppo."
            )
        settings = dict(settings_for(find_recipe(name)(), weights, settings, command.file))
        options = RecipeOptions(recipe=name, preset=command.preset)
        recipe = resolve(parse_recipe(options, rest, f"lockstep import {command.file}", imported=settings), 1)
        path = import_run(weights, recipe, command.file)
    console.print(f"Imported {len(weights)} tensors of {command.file} as {path}")
    console.print(f"  evaluate      lockstep eval {path}")
    console.print(f"  resume        lockstep resume {path}")
    console.print(f"  start from it lockstep train {name} --init-from {path}")
    return 0
