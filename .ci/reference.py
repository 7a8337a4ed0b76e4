"""Write docs/reference/ from the source: the Python API, the help of every command, every setting, every recipe.

It imports no torch.

The pages are not committed: `make docs` generates them each time, so that they cannot go stale.
"""

import ast
import contextlib
import functools
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, PAGES = ROOT / "src" / "lockstep", ROOT / "docs" / "reference"
os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}  # before anything asks how wide the terminal is

from api_reference import api  # noqa: E402

from lockstep.cli import COMMANDS, main  # noqa: E402
from lockstep.registry import RECIPES, recipe_module  # noqa: E402


def help_of(*words: str) -> str:
    """What `lockstep WORDS --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return "\n".join(line.rstrip() for line in page.getvalue().strip().splitlines())


def commands() -> str:
    parts = ["# Commands", "The output of `lockstep COMMAND --help`. With a recipe, its settings may follow."]
    parts += [f"```text\n{help_of()}\n```"]
    for command, summary in COMMANDS.items():
        sentence = f"{summary[0].upper()}{summary[1:].rstrip('.')}."
        parts += [f"## {command}", sentence, f"```text\n{help_of(command)}\n```"]
    return "\n\n".join(parts)


def settings() -> str:
    parts = [
        "# Settings",
        "Every field of every config. On a command line it is `--task.NAME`, `--algo.NAME` or `--run.NAME` (an "
        "underscore is a dash there), or `task.NAME=VALUE`; in a yaml file, a line under its part. Defaults are the "
        "config's own: a recipe may have others, which `lockstep train RECIPE --help` shows.",
    ]
    folders = [sorted((PACKAGE / folder).rglob("*.py")) for folder in ("tasks", "algorithms", "nn", "data")]
    for path in (PACKAGE / "config.py", *(path for folder in folders for path in folder)):
        parts += [part for kind in configs(path) for part in section(kind)]
    return "\n\n".join(parts)


def configs(path: Path) -> Iterator[ast.ClassDef]:
    """The config classes of a module that have fields, or are the base class of a user's own."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            if list(fields(node)) or "build" in methods:
                yield node


def literals() -> dict[str, ast.expr]:
    """The names that modules give to lists of allowed values, such as `Schedule = Literal["constant", "linear"]`."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            if ast.unparse(node.value).startswith("Literal["):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {ast.unparse(target): node.value for target in targets}
    return found


class Expanded(ast.NodeTransformer):
    """A type as a reader needs it: allowed values instead of their name, without `Literal`."""

    names = literals()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.visit(self.names[node.id]) if node.id in self.names else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.value) != "Literal":
            return node
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return functools.reduce(lambda left, right: ast.BinOp(left, ast.BitOr(), right), values)


def fields(kind: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and docstring of each field that has a docstring."""
    for node, after in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            default = ast.unparse(node.value) if node.value else ""
            if default.startswith("field(default_factory="):
                made = default.removeprefix("field(default_factory=").removesuffix(")")
                default = "{}" if made == "dict" else made.removeprefix("lambda: ") if "lambda" in made else f"{made}()"
            words = " ".join(str(after.value.value).split())
            yield ast.unparse(node.target), ast.unparse(Expanded().visit(node.annotation)), default, words


def section(kind: ast.ClassDef) -> Iterator[str]:
    yield f"## {kind.name}"
    yield (ast.get_docstring(kind) or "").split("\n")[0]
    cell = "| `{}` | `{}` | {} | {} |"
    rows = [
        cell.format(name, of.replace(" | ", " or "), f"`{default}`" if default else "", words.replace("|", "\\|"))
        for name, of, default, words in fields(kind)
    ]
    if rows:
        yield "\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *rows])


def recipes() -> str:
    parts = ["# Recipes", "Each is a file of at most 60 lines: an algorithm, on a task, with settings that work."]
    for name, words in RECIPES.items():
        source = (PACKAGE.parent / f"{recipe_module(name).replace('.', '/')}.py").read_text()
        parts += [f"## {name}", f"{words[0].upper()}{words[1:].rstrip('.')}.", f"```python\n{source.strip()}\n```"]
    return "\n\n".join(parts)


if __name__ == "__main__":
    pages = {"api": api, "commands": commands, "settings": settings, "recipes": recipes}
    if sys.argv[1:]:  # one page, to standard output
        sys.exit(sys.stdout.write(pages[sys.argv[1]]()) == 0)
    PAGES.mkdir(exist_ok=True)
    for name, page in pages.items():
        (PAGES / f"{name}.md").write_text(page() + "\n")
