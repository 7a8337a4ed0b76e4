"""The Python API page lists every public name and documents every argument."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[2]


def load_generator():
    spec = importlib.util.spec_from_file_location("api_reference", ROOT / ".ci/api_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


generator = load_generator()
FUNCTIONS = [name for name in lockstep._MODULES if name[0].islower()]


def node_of(name):
    return generator.definition(lockstep._MODULES[name], name)


@pytest.fixture(scope="module")
def page():
    return generator.api()


def test_page_has_a_section_for_every_public_name(page):
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert {name for name in lockstep.__all__ if name != "__version__"} <= set(headings)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_documents_every_argument_and_its_result(name):
    node = node_of(name)
    arguments = node.args
    named = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    named += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    docstring = generator.parse(ast.get_docstring(node))
    assert list(docstring.args) == named
    assert docstring.returns


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("VecEnv", ["setup", "reset", "observations", "step"]),
        ("Algorithm", ["setup", "collect", "update", "policy"]),
        ("NetworkConfig", ["build"]),
    ],
)
def test_base_class_section_lists_the_methods_to_implement(page, name, methods):
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    table = section.split("| method to implement | |")[1].split("\n\n")[0]
    assert [line.partition("(")[0].removeprefix("| `") for line in table.splitlines()[2:]] == methods


@pytest.mark.parametrize("name", ["VecEnv", "Algorithm", "Dataset", "Run"])
def test_every_public_method_has_a_docstring(name):
    kinds = [node_of(name), *(part for part in node_of(name).body if isinstance(part, ast.ClassDef))]
    methods = [part for kind in kinds for part in kind.body if isinstance(part, ast.FunctionDef)]
    bare = [part.name for part in methods if part.name[0] != "_" and not ast.get_docstring(part)]
    assert bare == []


def test_parser_keeps_text_after_a_section():
    parsed = generator.parse("Summary.\n\nArgs:\n    x: One\n        line.\n\nMore.\n\nRaises:\n    ValueError: Why.")
    assert parsed.text == "Summary.\n\nMore."
    assert parsed.args == {"x": "One line."}
    assert parsed.raises == {"ValueError": "Why."}


def test_settings_page_names_no_type_that_it_does_not_explain():
    shown = subprocess.run([sys.executable, ROOT / ".ci/reference.py", "settings"], capture_output=True, text=True)
    types = re.findall(r"^\| `\w+` \| `([^`]*)` \|", shown.stdout, re.MULTILINE)
    named = {name for kind in types for name in re.findall(r"\w+", re.sub(r"'[^']*'", "", kind)) if not name.isdigit()}
    plain = {"int", "float", "bool", "str", "None", "tuple", "dict", "or"}
    assert len(types) > 100
    assert named - plain <= set(re.findall(r"^## (\w+)", shown.stdout, re.MULTILINE))


@pytest.mark.parametrize("page", ["algorithm", "task"])
def test_every_name_on_customization_page_can_be_imported(page):
    text = (ROOT / "docs" / "customization" / f"{page}.md").read_text()
    names = set(re.findall(r"`lockstep\.([a-z_.]+)\.([A-Za-z]\w+)", text))
    assert names
    for module, name in names:
        assert hasattr(importlib.import_module(f"lockstep.{module}"), name), f"{module}.{name}"
