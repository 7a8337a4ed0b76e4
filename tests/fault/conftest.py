"""What tests of faults share: the runs that nothing happened to."""

from pathlib import Path

import pytest
from runs import errors, run

from lockstep.config import apply_overrides
from lockstep.registry import find_recipe
from lockstep.train import train
from processes import together
from tiny import hash_of


def paced(directory: str) -> None:
    recipe = find_recipe(str(Path(__file__).with_name("paced.py")))()
    train(apply_overrides(recipe, {"run.runs_dir": directory, "run.name": "run"}))


@pytest.fixture(scope="session")
def undisturbed_hash(tmp_path_factory):
    """The hash at the end of `paced.py` on a single process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    together(paced, 1, str(directory))
    return hash_of(directory / "run")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The hash at the end of the run of `runs.py` on a single process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert not errors(run(directory, "run", 1))
    return hash_of(directory / "run")
