"""Description of a task: an agent built from it equals one that is built from the task."""

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.inference import build_algorithm
from lockstep.registry import find_recipe
from lockstep.task_spec import NotRecordedError, TaskSpec, describe_task

CPU = torch.device("cpu")


class Described:
    """A task without environments."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space


def read_back(task):
    return TaskSpec(json.loads(describe_task(task)), 2, CPU)


@pytest.mark.parametrize(
    "name", ["gym-ddpg", "gym-sac", "gym-ppo-lstm", "snake-ppo", "team-ddpg", "dmc-tdmpc2", "gym-tdmpc2"]
)
def test_agent_from_description_equals_agent_from_task(name):
    if name.startswith("dmc"):
        pytest.importorskip("dm_control")
    recipe = find_recipe(name)
    recipe = apply_overrides(recipe(), recipe.smoke_overrides)
    agent = build_algorithm(recipe)
    other = build_algorithm(recipe, spec=json.loads(describe_task(agent.task)))
    assert isinstance(other.task, TaskSpec)
    state, other_state = agent.shared_state(), other.shared_state()
    assert state.keys() == other_state.keys()
    assert all(torch.equal(tensor, other_state[key]) for key, tensor in state.items())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (3,), np.float32),
        spaces.Box(np.array([-1, -np.inf], np.float32), np.array([0.1, 2], np.float32)),
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(0, 5, (), np.int64),
        spaces.Discrete(5),
        spaces.MultiDiscrete([2, 3]),
        spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Box(0, 1, (2,)))]),
    ],
)
def test_space_is_equal_after_round_trip(space):
    found = read_back(Described(space, space)).observation_space
    assert found == space
    assert list(getattr(found, "keys", list)()) == list(getattr(space, "keys", list)())  # networks depend on the order


def test_description_of_unsupported_space_is_none():
    assert describe_task(Described(spaces.Text(3), spaces.Discrete(2))) is None


def test_unrecorded_attribute_is_never_a_default():
    spec = read_back(Described(spaces.Discrete(2), spaces.Discrete(2)))
    assert getattr(spec, "agents", None) is None
    with pytest.raises(NotRecordedError):
        getattr(spec, "difficulty", 3)


def test_agent_that_needs_more_is_built_from_task():
    recipe = apply_overrides(find_recipe("snake-ppo")(), {"task.size": 4})
    task = recipe.task.build(Runtime.single_process(recipe.run).lanes, CPU)
    spec, asked = json.loads(describe_task(task)), []

    class Curious(type(recipe.algo).owner):
        def setup(self):
            asked.append(type(self.task))
            self.size = self.task.config.size
            super().setup()

    object.__setattr__(recipe, "algo", Curious.Config())
    assert build_algorithm(recipe, spec=spec).size == 4
    assert asked == [TaskSpec, type(task)]
