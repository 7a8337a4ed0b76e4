"""`lockstep train RECIPE --help`: options of the command, settings, presets and accepted names of other tools."""

import textwrap
from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Annotated, Any

import tyro

from lockstep.cli.flag_aliases import ALIASES
from lockstep.cli.options import StartOptions
from lockstep.cli.parser import parse_args
from lockstep.cli.unit_flags import UNIT_FLAGS
from lockstep.config import Recipe, as_dict, flat_settings
from lockstep.recipes.env_presets import ENV_PRESETS

WIDTH = 80
NO_BREAK = "\0"
"""Stands for a space at which a line is not wrapped."""


def print_recipe_help(name: str, recipe_class: type[Recipe]) -> None:
    """Print the help of a recipe and exit."""
    recipe = recipe_class()
    parts = (("options", StartOptions()), ("settings", recipe))
    # An empty name: flags of both parts have no prefix.
    command = make_dataclass(
        "Train", [(part, Annotated[type(value), tyro.conf.arg(name="")], value) for part, value in parts]
    )
    command.__doc__ = _description(recipe)
    parse_args(command, ["--help"], f"lockstep train {name}")


def _description(recipe: Recipe) -> str:
    paragraphs = [(type(recipe).__doc__ or "").strip().partition("\n")[0]]
    paragraphs += [
        f"Preset: --preset {preset}{_automatic(preset)} sets {_as_text(values)}"
        for preset, values in recipe.presets.items()
    ]
    settings = {key.replace("_", "-") for key in flat_settings(as_dict(recipe))}
    aliases = sorted({**ALIASES, **recipe.aliases}.items())
    names = ", ".join(f"--{alias}{NO_BREAK}({key})" for alias, key in aliases if key in settings)
    paragraphs += [
        f"Settings may be given as key=value. Names of other tools are accepted: {names}.",
        f"With another unit, which is converted: {', '.join(f'--{flag}' for flag in UNIT_FLAGS)}.",
    ]
    wrapped = (textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for text in paragraphs)
    return "\n\n".join(wrapped).replace(NO_BREAK, " ")


def _automatic(preset: str) -> str:
    """Return the environments for which a preset is chosen without a flag."""
    return f" (automatic for {', '.join(ENV_PRESETS[preset])})" if preset in ENV_PRESETS else ""


def _as_text(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in flat_settings(values).items())
