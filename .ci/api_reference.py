"""The page docs/reference/api.md: every public name with its docstring, read from the source. Imports no torch."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import lockstep

PACKAGE = Path(lockstep.__file__).parent
WIDTH = 100
"""Longest signature on one line."""
ALSO = {"load": ("inference", "LoadedPolicy"), "VecEnv": ("base.env_rendering", "EnvRendering")}
"""Classes without a public name that belong to a public one: what a function returns, or a base class."""
INTRODUCTION = """\
# Python API

The names of `lockstep.__all__`. `import lockstep` offers them without importing torch; each is imported on first use.
[Stability](../stability.md) says which changes a version may bring, and [Python API](../quickstart/python.md) shows how
the functions are used.

`lockstep.__version__` is the version as a string."""


@dataclass
class Docstring:
    """A docstring in its parts: text, and the entries of Args, Returns and Raises."""

    text: str = ""
    args: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)


def parse(docstring: str) -> Docstring:
    """Split a docstring at its section headings. Text after a section belongs to the text."""
    sections: dict[str, list[str]] = {"": [], "Args:": [], "Returns:": [], "Raises:": []}
    current = ""
    for line in docstring.splitlines():
        if line and line in sections:
            current = line
        elif line and not line.startswith(" ") and current:
            current = ""
            sections[current] += ["", line]
        else:
            sections[current].append(line)
    returns = " ".join(" ".join(sections["Returns:"]).split())
    return Docstring(
        re.sub(r"\n{3,}", "\n\n", "\n".join(sections[""])).strip(),
        _entries(sections["Args:"]),
        returns,
        _entries(sections["Raises:"]),
    )


def _entries(lines: list[str]) -> dict[str, str]:
    """Entries `name: text` by name. Continuation lines are indented further."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if match := re.match(r" {4}(\*{0,2}\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif line.strip():
            found[name] += f" {line.strip()}"
    return found


def api() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for name, module in lockstep._MODULES.items():
        parts += section(name, definition(module, name))
        if name in ALSO:
            parts += section(ALSO[name][1], definition(*ALSO[name]))
    return "\n\n".join(parts)


def definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the definition of a name in a module of the package."""
    body = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text()).body
    for node in body:  # a module may export a name of another one
        if isinstance(node, ast.ImportFrom) and any(alias.asname == name for alias in node.names):
            return definition(str(node.module).removeprefix("lockstep."), name)
    *overloads, found = (n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    assert len(overloads) == sum(ast.unparse(mark) == "overload" for n in overloads for mark in n.decorator_list)
    return found


def section(name: str, node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    yield f"## {name}"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{signature(node)}: ...\n```"
        yield from described(parse(ast.get_docstring(node) or ""))
        return
    yield from described(parse(ast.get_docstring(node) or ""))
    if name.endswith("Config") and any(isinstance(part, ast.AnnAssign) for part in node.body):
        yield f"Its fields are in [Settings](settings.md#{name.lower()})."
        return
    yield from members(node)
    for part in node.body:
        if isinstance(part, ast.ClassDef):
            yield f"### {name}.{part.name}"
            yield from described(parse(ast.get_docstring(part) or ""))
            yield from members(part)


def described(docstring: Docstring) -> Iterator[str]:
    """Text, a table of arguments, and what is returned and raised."""
    yield docstring.text
    if docstring.args:
        rows = [f"| `{name}` | {cell(text)} |" for name, text in docstring.args.items()]
        yield "\n".join(["| argument | |", "| --- | --- |", *rows])
    if docstring.returns:
        yield f"**Returns:** {docstring.returns}"
    if docstring.raises:
        rows = [f"| `{name}` | {cell(text)} |" for name, text in docstring.raises.items()]
        yield "\n".join(["| raises | |", "| --- | --- |", *rows])


def members(kind: ast.ClassDef) -> Iterator[str]:
    """Tables of attributes and methods. Methods that raise NotImplementedError are those to implement."""
    methods = [part for part in kind.body if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]
    properties = {part.name: part for part in methods if _is_property(part)}
    attributes = dict(documented(kind.body))
    for part in kind.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            attributes |= dict(documented(part.body))
    attributes |= {name: ast.get_docstring(part) or "" for name, part in properties.items()}
    if attributes:
        rows = [f"| `{name}` | {cell(text)} |" for name, text in attributes.items()]
        yield "\n".join(["| attribute | |", "| --- | --- |", *rows])
    plain = [part for part in methods if part.name not in properties]
    required = [part for part in plain if _is_abstract(part)]
    rest = [part for part in plain if part not in required]
    if required:
        yield table("method to implement", required)
    if rest:
        yield table("method with a default" if required else "method", rest)


def documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Name and docstring of each attribute that is followed by one."""
    for node, after in pairwise(body):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            if isinstance(node, ast.AnnAssign):
                yield ast.unparse(node.target), str(after.value.value)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                yield ast.unparse(node.targets[0]).removeprefix("self."), str(after.value.value)


def table(heading: str, methods: list[ast.FunctionDef]) -> str:
    # A `|` between backticks does not end a cell.
    rows = [f"| `{signature(part, wide=True)}` | {summary(part)} |" for part in methods]
    return "\n".join([f"| {heading} | |", "| --- | --- |", *rows])


def summary(method: ast.FunctionDef) -> str:
    """The docstring of a method as one table cell."""
    docstring = parse(ast.get_docstring(method) or "")
    parts = [docstring.text, *(f"`{name}`: {text}" for name, text in docstring.args.items())]
    parts += [f"Returns: {docstring.returns}"] if docstring.returns else []
    parts += [f"Raises `{name}`: {text}" for name, text in docstring.raises.items()]
    return "<br>".join(cell(part) for part in parts)


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def signature(function: ast.FunctionDef, wide: bool = False) -> str:
    """The signature of a function: on one line, or with one argument per line; of a method without `self`."""
    parts = [part for part in _arguments(function.args) if part != "self"]
    returns = f" -> {_annotation(function.returns)}" if function.returns else ""
    line = f"{function.name}({', '.join(parts)}){returns}"
    if wide:
        return line
    if len(line) <= WIDTH:
        return f"def {line}"
    lines = "".join(f"    {part},\n" for part in parts)
    return f"def {function.name}(\n{lines}){returns}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Each argument with its annotation and default."""
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_annotation(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{annotation}" + (f" = {ast.unparse(default)}" if default else "")


def _annotation(node: ast.expr) -> str:
    """An annotation as text, also if the source quotes it."""
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _is_property(method: ast.FunctionDef) -> bool:
    return any(
        isinstance(mark, ast.Name) and mark.id in ("property", "cached_property") for mark in method.decorator_list
    )


def _is_abstract(method: ast.FunctionDef) -> bool:
    """Whether a method does nothing but raise NotImplementedError."""
    last = method.body[-1]
    return isinstance(last, ast.Raise) and last.exc is not None and "NotImplementedError" in ast.unparse(last.exc)
