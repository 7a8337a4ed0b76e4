"""`lockstep train RECIPE --help`: options of the command, settings, presets and accepted names of other tools."""

import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Annotated, Any

import tyro

from lockstep.cli.flag_aliases import ALIASES
from lockstep.cli.options import StartOptions
from lockstep.cli.parser import parse_args
from lockstep.cli.unit_flags import UNIT_FLAGS
from lockstep.config import Recipe

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
    paragraphs += [f"Preset: --preset {preset} sets {_as_flags(values)}" for preset, values in recipe.presets.items()]
    settings = set(_keys(recipe))
    aliases = sorted({**ALIASES, **recipe.aliases}.items())
    names = ", ".join(f"--{alias}{NO_BREAK}({key})" for alias, key in aliases if key in settings)
    paragraphs += [
        f"Settings may be given as key=value. Names of other tools are accepted: {names}.",
        f"With another unit, which is converted: {', '.join(f'--{flag}' for flag in UNIT_FLAGS)}.",
    ]
    wrapped = (textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for text in paragraphs)
    return "\n\n".join(wrapped).replace(NO_BREAK, " ")


def _as_flags(values: Mapping[str, Any], prefix: str = "") -> str:
    """Return nested values as `key=value`."""
    parts = [
        _as_flags(value, f"{prefix}{key}.") if isinstance(value, Mapping) else f"{prefix}{key}={value}"
        for key, value in values.items()
    ]
    return " ".join(parts)


def _keys(config: Any, prefix: str = "") -> list[str]:
    """Return the flags of all settings, without dashes in front."""
    keys = []
    for field in fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name.replace('_', '-')}"
        keys += _keys(value, f"{key}.") if is_dataclass(value) else [key]
    return keys
