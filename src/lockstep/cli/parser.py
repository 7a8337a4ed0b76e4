"""Command-line parser: tyro, with numbers such as `1e6` for integers and `none` in any case."""

from collections.abc import Sequence
from typing import TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from lockstep.config import to_int

Command = TypeVar("Command")

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def _integer(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if type_info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda args: to_int(args[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


@REGISTRY.primitive_rule
def _none(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[None] | None:
    if type_info.type is not type(None):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="None",
        instance_from_str=_parse_none,
        is_instance=lambda value: value is None,
        str_from_instance=lambda _: ["None"],
    )


def _parse_none(args: list[str]) -> None:
    if args[0].lower() != "none":
        raise ValueError(f"{args[0]} is not None")


def parse_args(kind: type[Command], args: Sequence[str], prog: str, default: Command | None = None) -> Command:
    """Parse the flags of a dataclass."""
    if default is None:
        return tyro.cli(kind, args=list(args), prog=prog, registry=REGISTRY)
    return tyro.cli(kind, args=list(args), prog=prog, registry=REGISTRY, default=default)


def parse_known_args(
    kind: type[Command], args: Sequence[str], prog: str, description: str | None = None
) -> tuple[Command, list[str]]:
    """Parse the flags of a dataclass. Return it and the remaining arguments."""
    return tyro.cli(
        kind, args=list(args), prog=prog, description=description, registry=REGISTRY, return_unknown_args=True
    )
