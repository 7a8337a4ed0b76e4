"""Automatic names of runs."""

import re

import pytest

from lockstep.config import NAME_BYTES, apply_overrides
from lockstep.registry import find_recipe
from lockstep.run_name import automatic_name


@pytest.mark.parametrize(
    ("recipe", "settings", "start"),
    [
        ("gym-ppo", {"task.id": "Hopper-v5"}, "gym-ppo-Hopper-v5"),
        ("gym-ppo", {"task.id": "ALE/Pong-v5"}, "gym-ppo-ALE-Pong-v5"),
        ("gym-ppo", {"task.id": "path/my env.py:Reach-v0"}, "gym-ppo-Reach-v0"),
        ("gym-ppo", {"task.id": "../\u00e9 v"}, "gym-ppo-..-v"),
        ("gym-ppo", {"task.id": "x" * 500}, "gym-ppo-" + "x" * 40),
        ("dmc-tdmpc2", {"task.tasks": ["cup-catch"]}, "dmc-tdmpc2-cup-catch"),
        ("dmc-tdmpc2", {"task.tasks": ["walker-run", "cup-catch"]}, "dmc-tdmpc2-2-tasks"),
        ("snake-ppo", {}, "snake-ppo"),
    ],
)
def test_automatic_name_contains_recipe_environment_and_time(recipe, settings, start):
    name = automatic_name(apply_overrides(find_recipe(recipe)(), settings))
    assert re.fullmatch(re.escape(start) + r"-\d{8}-\d{6}", name)
    assert len(name) < NAME_BYTES
