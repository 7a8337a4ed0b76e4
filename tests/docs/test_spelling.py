"""Commands on pages whose commands are not run have valid verbs, flags and settings."""

import re
import shlex
from pathlib import Path

import pytest
from test_commands import PAGES, ROOT, commands

from lockstep.cli import COMMANDS, main
from lockstep.cli.options import parse_recipe, parse_train, resolve

PLACES = {
    "RECIPE": "snake-ppo",
    "FILE.py": "examples/tiny_snake.py",
    "SIZE": "5",
    "../base/recipe.py": "examples/tiny_snake.py",
    "recipe.py": "examples/tiny_snake.py",
    "rival/submission.py": "examples/catch.py",  # any file: it is not executed here
}
"""Placeholders on the pages, and values for them."""

UNTESTED = [
    (page, command)
    for page in sorted(Path(ROOT / "docs").rglob("*.md"))
    if page not in PAGES and "reference" not in page.parts
    for command in commands(page)
    if re.match(r"(torchrun .*-m )?lockstep ", command)
]


@pytest.fixture(scope="module")
def helps():
    return {}


def help_of(verb, helps, capsys, monkeypatch):
    if verb not in helps:
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        helps[verb] = capsys.readouterr().out
    return helps[verb]


def wrong_flags(words, page):
    """Return the flags that are missing on a help page."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    return [flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", page)]


@pytest.mark.parametrize(("page", "command"), UNTESTED, ids=lambda part: part.stem if isinstance(part, Path) else part)
def test_command_on_page_has_valid_verb_flags_and_settings(page, command, helps, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("lockstep.algorithms.tdmpc2.config.read_index", lambda directory: {})  # no data set is there
    for name, thing in PLACES.items():
        command = command.replace(name, thing)
    words = shlex.split(re.split(r" (?:>|&&) ", command)[0])
    verb, *rest = words[words.index("lockstep") + 1 :]
    assert verb in COMMANDS
    if verb == "jobfile":
        dashes = rest.index("--")
        check_training(rest[dashes + 2 :])
        rest = rest[:dashes]
    if verb == "audit":
        rest = rest[: next(place for place, word in enumerate(rest) if word.endswith(".py") or word == "-m")]
    if verb == "train":
        check_training(rest)
    elif verb not in ("prove", "bench", "plan", "backtest", "import"):  # these also take a recipe's words
        assert wrong_flags(rest, help_of(verb, helps, capsys, monkeypatch)) == []


def check_training(words):
    start, rest, _ = parse_train(words)
    resolve(parse_recipe(start, rest, "lockstep train", start.config), 1)


def test_wrong_flags_finds_an_unknown_flag(helps, capsys, monkeypatch):
    page = help_of("play", helps, capsys, monkeypatch)
    assert wrong_flags(["runs/NAME", "--gif", "a.gif"], page) == []
    assert wrong_flags(["runs/NAME", "--git", "a.gif"], page) == ["--git"]


def test_pages_have_more_than_30_such_commands():
    assert len(UNTESTED) > 30
