"""Small files that may come from anybody: read up to a bound, parsed without running anything, refused in a sentence.

A file is looked at before it is opened, so that one of a gigabyte, a pipe or a device costs nothing. What is parsed
may be larger than its text; with these bounds it stays under 256 MiB.
"""

import json
import stat
from pathlib import Path
from typing import Any

JSON_BYTES = 4 * 2**20
"""A manifest of 4,096 processes takes a tenth of it."""
YAML_BYTES = 256 * 2**10
YAML_PARTS, YAML_DEPTH = 20_000, 40
"""How many values a yaml file may hold with every alias written out, and how deep they may lie in each other."""


class Unreadable(Exception):
    """A file that cannot be what it is taken for: which one, and why."""


class ReadFailed(Unreadable):
    """A file that the system did not let us read (EACCES, EIO, ESTALE). That says nothing about its content."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.error = error


def read_text(path: Path, limit: int) -> str:
    """The text of a plain file of at most so many bytes; FileNotFoundError where there is none."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable(f"{path} is not a file")
        with path.open("rb") as file:
            text = file.read(limit + 1)  # one more, because it may have grown
        if len(text) > limit:
            raise Unreadable(f"{path} holds {max(found.st_size, len(text)):,} bytes, more than the {limit:,} it may")
        return text.decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ReadFailed(f"{path} cannot be read: {error}", error) from None
    except ValueError as error:
        raise Unreadable(f"{path} cannot be read: {error}") from None


def read_json(path: Path, limit: int = JSON_BYTES) -> Any:
    """The value in a json file."""
    text = read_text(path, limit)
    try:
        return parse_json(text)
    except ValueError as error:
        raise Unreadable(f"{path} is not json: {error}") from None


def parse_json(text: str) -> Any:
    """The value of a json text; ValueError for whatever is wrong with it, and for a key that stands twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says {next(name for name in names if names.count(name) > 1)[:100]!r} twice")
    return values


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
            raise ValueError(f"it says {next(name for name in names if names.count(name) > 1)[:100]!r} twice")
    if node.id != "scalar":
        for part in node.value:
            for each in part if isinstance(part, tuple) else (part,):
                _measure(each, depth - 1, parts)
