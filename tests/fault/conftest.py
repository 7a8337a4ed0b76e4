"""Fixtures of the fault tests: hashes of undisturbed runs."""

from pathlib import Path

import pytest
from run_helpers import errors, run

from helpers.multiprocess import together
from helpers.tiny_recipes import hash_of
from lockstep.config import apply_overrides
from lockstep.registry import find_recipe
from lockstep.training_loop import train


def paced(directory: str) -> None:
    recipe = find_recipe(str(Path(__file__).with_name("slow_recipe.py")))()
    train(apply_overrides(recipe, {"run.runs_dir": directory, "run.name": "run"}))


@pytest.fixture(scope="session")
def undisturbed_hash(tmp_path_factory):
    """The final hash of `slow_recipe.py` on a single process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    together(paced, 1, str(directory))
    return hash_of(directory / "run")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The final hash of the run in `run_helpers.py` on a single process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert not errors(run(directory, "run", 1))
    return hash_of(directory / "run")
