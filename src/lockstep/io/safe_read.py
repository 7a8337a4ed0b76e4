"""Read small untrusted files: limit their size, parse them without executing code, and raise readable errors.

Every file of a run is opened for reading by `open_regular`. It refuses pipes, sockets, devices and directories without
blocking. Parsed values may take more memory than their text; with these limits they stay under 256 MiB.
"""

import errno
import json
import os
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any

JSON_BYTES = 4 * 2**20
"""Size limit of a JSON file. A manifest of 4,096 processes takes a tenth of it."""
YAML_BYTES = 256 * 2**10
YAML_PARTS, YAML_DEPTH = 20_000, 40
"""Limits of a YAML file: number of values with every alias expanded, and nesting depth."""


_READ_ONLY = os.O_RDONLY
for _flag in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"):  # not all exist on every system
    _READ_ONLY |= getattr(os, _flag, 0)


class UnreadableFileError(Exception):
    """Invalid file. The message names the file and says why it is invalid."""


class ReadFailed(UnreadableFileError):
    """The operating system could not read a file (EACCES, EIO, ESTALE). Its content may still be valid."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.error = error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raise UnreadableFileError for other kinds, OSError if it cannot be opened.

    The check is made on the open file, so that the path cannot be replaced in between. Without O_NONBLOCK, opening a
    pipe would wait for a writer.
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
    """Return the content of a regular file of at most `limit` bytes. Raise FileNotFoundError if it does not exist."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(limit + 1) if size <= limit else b""  # one more byte, because the file may have grown
        if (size := max(size, len(content))) > limit:
            raise UnreadableFileError(f"{path} holds {size:,} bytes, more than the limit of {limit:,}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ReadFailed(f"{path} cannot be read: {error}", error) from None
    return content


def read_text(path: Path, limit: int) -> str:
    """Return the text of a regular file of at most `limit` bytes. Raise FileNotFoundError if it does not exist."""
    try:
        return read_bytes(path, limit).decode()
    except ValueError as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}") from None


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """Return the value in a JSON file."""
    text = read_text(path, limit)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UnreadableFileError(f"{path} is not json: {error}") from None


def parse_json(text: str) -> Any:
    """Parse a JSON text. Raise ValueError for any problem, including duplicate keys."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def shallow(value: Any, depth: int = YAML_DEPTH) -> bool:
    """Return whether a parsed value is nested at most `depth` deep. Code that walks settings is recursive."""
    if depth < 0:
        return False
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(shallow(part, depth - 1) for part in parts)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"the key {_repeated([name for name, _ in pairs])[:100]!r} is duplicated")
    return values


def _repeated(names: list[str]) -> str:
    """Return a duplicate name, in one pass because there may be a million names."""
    return next(name for name, count in Counter(names).items() if count > 1)


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
"""Created once, because a log has a hundred thousand lines."""


def parse_yaml(text: str) -> Any:
    """Parse a YAML text with the safe loader. Raise ValueError for any problem."""
    import yaml  # imported here to keep `--help` fast

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
        # The safe loader executes no code, but raises errors of other types for values such as `!!int ""`.
        raise ValueError(str(error) or type(error).__name__) from None


def _measure(node: Any, depth: int, parts: list[int]) -> None:
    """Check depth and size of a document with every alias expanded: a few lines could expand to billions of values."""
    parts[0] -= 1
    if depth < 0 or parts[0] < 0:
        raise ValueError("it is nested too deep" if depth < 0 else "its aliases expand to too many values")
    if node.id == "mapping":
        names = [key.value for key, _ in node.value if key.id == "scalar"]
        if len(set(names)) < len(names):
            raise ValueError(f"the key {_repeated(names)[:100]!r} is duplicated")
    if node.id != "scalar":
        for part in node.value:
            for child in part if isinstance(part, tuple) else (part,):
                _measure(child, depth - 1, parts)
