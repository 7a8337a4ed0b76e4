"""Connection of a class with its nested settings."""

from dataclasses import dataclass
from typing import Any


class Configurable:
    """A class whose `Config.build` builds it. A class without its own Config gets a copy of the inherited one."""

    Config: Any

    def __init_subclass__(cls) -> None:
        if "Config" not in vars(cls):
            attributes = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
            config_class = type("Config", (cls.Config,), attributes | {"__doc__": "No settings."})
            cls.Config = dataclass(frozen=True, kw_only=True)(config_class)
        cls.Config.owner = cls
