"""Copy functions of several modules into one file that needs only numpy and Python 3.7.

Only the statements that the file needs are copied: those that define a name that another copied statement uses.
Decorators are dropped, so nothing is compiled. Annotations stay, because Python 3.7 does not evaluate them after
`from __future__ import annotations`.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PYTHON = (3, 7)
"""Version of Python that the file needs."""
IMPORTED = {"base64", "np"}
"""Names that the header of the file imports."""
BUILTINS = {
    *("ValueError", "abs", "any", "bool", "bytes", "dict", "enumerate", "float", "int", "len", "list", "max", "min"),
    *("range", "set", "setattr", "str", "sum", "tuple", "zip"),
}
"""Built-in names that the file may use."""
_HEADER = '''"""{docstring}"""

from __future__ import annotations

import base64

import numpy as np
'''


class _Statement(NamedTuple):
    """Statement of a module, with the names that it defines and those that it uses from elsewhere."""

    defines: set[str]
    uses: set[str]
    text: str


def flatten(modules: Sequence[Path], entry: str, docstring: str) -> str:
    """Return the text of one file: the statements of `modules` that `entry` needs, in their order, and `entry`.

    Args:
        modules: Files, such that a module comes after those that it imports.
        entry: Statements at the end of the file. They may use names of the modules.
        docstring: Text at the beginning of the file.
    """
    statements = [statement for module in modules for statement in _statements(module.read_text())]
    last = list(_statements(entry))
    needed, pending = set[str](), [name for statement in last for name in statement.uses]
    own = {name for statement in last for name in statement.defines}
    while pending:
        name = pending.pop()
        if name in needed or name in own or name in IMPORTED | BUILTINS:
            continue
        needed.add(name)
        found = [statement for statement in statements if name in statement.defines]
        if len(found) != 1:  # a programming error, which tests find
            raise ValueError(f"{name} is defined {len(found)} times in {', '.join(path.name for path in modules)}.")
        pending += found[0].uses
    parts = [_HEADER.format(docstring=docstring)]
    parts += [statement.text for statement in statements if statement.defines & needed]
    text = "\n\n".join(parts) + f"\n\n\n{entry}"
    ast.parse(text, feature_version=PYTHON)
    return text


def _statements(text: str) -> Iterator[_Statement]:
    """Yield the statements of a module without imports. A string after a constant, its description, belongs to it."""
    body, lines = ast.parse(text).body, text.splitlines()
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            continue
        described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        end = following.end_lineno if following and described else node.end_lineno
        names = _Names()
        names.visit(node)
        defines = {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else names.stored
        # The first line of a decorated function is the one after its decorators.
        text = "\n".join(lines[node.lineno - 1 : end])
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = f"\n{text}\n"
        yield _Statement(defines, names.loaded - names.stored, text)


class _Names(ast.NodeVisitor):
    """Names that a statement loads and stores, without those in annotations and decorators."""

    def __init__(self) -> None:
        self.loaded, self.stored = set[str](), set[str]()

    def visit_Name(self, node: ast.Name) -> None:
        (self.loaded if isinstance(node.ctx, ast.Load) else self.stored).add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.stored.add(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (node.args, *node.body):
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for part in (node.target, node.value):
            if part is not None:
                self.visit(part)
