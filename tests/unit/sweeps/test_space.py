"""Search spaces: values are stored as the recipe stores them, and errors name the setting."""

import json

import pytest

from lockstep.config import ConfigError
from lockstep.registry import find_recipe
from lockstep.sweeps.space import Choices, Range, parse_space, read_space, space_as_dict


@pytest.fixture(scope="module")
def recipe():
    return find_recipe("gym-ppo")()


def test_space_file_has_ranges_and_choices(recipe, tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text(
        "algo.learning-rate: {low: 1e-5, high: 1e-2, log: true}\n"
        "algo.epochs: {low: 1, high: 9, step: 2}\n"
        "algo.gamma: [0.9, 0.99]\n"
        "task.id: {choices: [CartPole-v1, Acrobot-v1]}\n"
    )
    space = read_space(file, recipe)
    assert space == {
        "algo.learning_rate": Range(low=1e-5, high=1e-2, log=True),
        "algo.epochs": Range(low=1, high=9, step=2),
        "algo.gamma": Choices((0.9, 0.99)),
        "task.id": Choices(("CartPole-v1", "Acrobot-v1")),
    }
    assert [space["algo.epochs"].is_integer, space["algo.learning_rate"].is_integer] == [True, False]
    assert parse_space(json.loads(json.dumps(space_as_dict(space))), recipe, "again") == space


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"algo.learnin_rate": [1]}, "'algo.learnin_rate' is not a setting"),
        ({"algo.gamma": 0.9}, "algo.gamma is '0.9', not a range or a list of choices"),
        ({"algo.gamma": {"low": 0.9}}, "algo.gamma has no low or no high"),
        ({"algo.gamma": {"min": 0.9, "max": 1}}, "algo.gamma has the unknown key 'min'"),
        ({"algo.gamma": {"low": 0.99, "high": 0.9}}, "algo.gamma has low 0.99 and high 0.9"),
        ({"algo.learning_rate": {"low": 0, "high": 1, "log": True}}, "algo.learning_rate has low 0.0 on a log scale"),
        ({"algo.epochs": {"low": 1, "high": 4, "log": "yes"}}, "log of algo.epochs is 'yes'"),
        ({"algo.epochs": {"low": 1, "high": 4, "step": 9}}, "algo.epochs has step 9"),
        ({"algo.epochs": {"low": 1.5, "high": 4}}, "'algo.epochs' is 1.5, which is not int"),
        ({"algo.epochs": []}, "algo.epochs must have 1 to 1,000 choices"),
        ({"algo.epochs": [2, "2"]}, "algo.epochs has the same choice twice"),
        ({"run.total_samples": [10, 20]}, "run.total_samples cannot be searched"),
        ({}, "space.yaml has no settings"),
    ],
)
def test_invalid_entry_is_refused_with_its_name(recipe, entry, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_space(entry, recipe, "space.yaml")
