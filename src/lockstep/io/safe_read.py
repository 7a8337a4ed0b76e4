"""Small files that may come from anybody: read up to a bound, parsed without running anything, refused in a sentence.

Every file of a run is opened for reading by `open_regular`: a pipe, a socket, a device or a directory in its place is
refused without waiting. What is parsed may be larger than its text; with these bounds it stays under 256 MiB.
"""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

JSON_BYTES = 4 * 2**20
"""A manifest of 4,096 processes takes a tenth of it."""
YAML_BYTES = 256 * 2**10
YAML_PARTS, YAML_DEPTH = 20_000, 40
"""How many values a yaml file may hold with every alias written out, and how deep they may lie in each other."""


_READ_ONLY = os.O_RDONLY
for _flag in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"):  # where the system has them
    _READ_ONLY |= getattr(os, _flag, 0)


class UnreadableFileError(Exception):
    """A file that cannot be what it is taken for: which one, and why."""


class ReadFailed(UnreadableFileError):
    """A file that the system did not let us read (EACCES, EIO, ESTALE). That says nothing about its content."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.error = error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; Unreadable for anything else, OSError where it cannot be opened.

    The check is made on the open file, so that nothing can be put in its place in between. Without O_NONBLOCK the open
    of a pipe would wait for a writer.
    """
    try:
        descriptor = os.open(path, _READ_ONLY)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device without a driver
            raise UnreadableFileError(f"{path} is not a file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFileError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; FileNotFoundError where there is none."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(limit + 1) if size <= limit else b""  # one more, because it may have grown
        if (size := max(size, len(content))) > limit:
            raise UnreadableFileError(f"{path} holds {size:,} bytes, more than the {limit:,} it may")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ReadFailed(f"{path} cannot be read: {error}", error) from None
    return content


def read_text(path: Path, limit: int) -> str:
    """The text of a regular file of at most `limit` bytes; FileNotFoundError where there is none."""
    try:
        return read_bytes(path, limit).decode()
    except ValueError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}") from None


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The value in a json file."""
    text = read_text(path, limit)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UnreadableFileError(f"{path} is not json: {error}") from None


def parse_json(text: str) -> Any:
    """The value of a json text; ValueError for whatever is wrong with it, and for a key that stands twice."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def shallow(value: Any, depth: int = YAML_DEPTH) -> bool:
    """Whether a parsed value is nested no deeper than settings may be; code that walks settings is recursive."""
    if depth < 0:
        return False
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(shallow(part, depth - 1) for part in parts)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"it says {_repeated([name for name, _ in pairs])[:100]!r} twice")
    return values


def _repeated(names: list[str]) -> str:
    """The first name that has stood before; in one pass, because there may be a million."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
"""Made once: a log has a hundred thousand lines."""


def parse_yaml(text: str) -> Any:
    """The value of a yaml text, read with the safe loader; ValueError for whatever is wrong with it."""
    import yaml  # here, because `--help` reads none and waits for each import

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(node, YAML_DEPTH, [YAML_PARTS])
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # The safe loader runs nothing, but stumbles over values such as `!!int ""` in its own words.
        raise ValueError(str(error) or type(error).__name__) from None


def _measure(node: Any, depth: int, parts: list[int]) -> None:
    """Walk a document as if every alias were written out, so that a few lines cannot stand for billions."""
    parts[0] -= 1
    if depth < 0 or parts[0] < 0:
        raise ValueError("it is nested too deep" if depth < 0 else "its aliases stand for too many values")
    if node.id == "mapping":
        names = [key.value for key, _ in node.value if key.id == "scalar"]
        if len(set(names)) < len(names):
            raise ValueError(f"it says {_repeated(names)[:100]!r} twice")
    if node.id != "scalar":
        for part in node.value:
            for each in part if isinstance(part, tuple) else (part,):
                _measure(each, depth - 1, parts)
