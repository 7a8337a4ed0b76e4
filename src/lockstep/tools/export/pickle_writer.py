"""Write the few pickles that a file of Stable-Baselines3 contains. Neither this module nor Lockstep reads them.

The `pickle` module is not used, because it could also load pickles. The opcodes are those of protocol 2: names of
functions and classes, calls of them, and plain values.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PickleGlobal:
    """Class or function that the reader imports by module and name."""

    module: str
    name: str


@dataclass(frozen=True)
class PickleReduce:
    """Return value of a function that the reader calls."""

    function: PickleGlobal
    arguments: tuple[Any, ...]


def pickled(value: Any) -> bytes:
    """Encode a value as a pickle."""
    return b"\x80\x02" + _encode(value) + b"."


def _encode(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return f"I{value}\n".encode()
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case tuple():
            return b"(" + b"".join(map(_encode, value)) + b"t"
        case list():
            return b"(" + b"".join(map(_encode, value)) + b"l"
        case Mapping():
            return b"(" + b"".join(_encode(key) + _encode(part) for key, part in value.items()) + b"d"
        case PickleGlobal():
            return f"c{value.module}\n{value.name}\n".encode()
        case PickleReduce():
            return _encode(value.function) + _encode(value.arguments) + b"R"
    raise TypeError(f"{type(value).__name__} cannot be pickled here")
