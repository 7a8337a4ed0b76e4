"""Connection of a class with its settings."""

from dataclasses import dataclass
from typing import Any


def bind_config(cls: Any) -> None:
    """Make a class's Config build that class. A class without its own Config gets a copy of the inherited one."""
    if "Config" not in vars(cls):
        names = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config", "__doc__": "No settings."}
        cls.Config = dataclass(frozen=True, kw_only=True)(type("Config", (cls.Config,), names))
    cls.Config.owner = cls
