"""Spaces as tensors: observation encoding and random action sampling."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.gym.obs_encoding import encode_obs, encoded_space
from lockstep.tasks.gym.spaces import allocate, policy_space, sample_action

OBSERVATIONS = [
    Discrete(4, start=-1),
    MultiDiscrete([2, 5, 3]),
    MultiBinary(6),
    Box(-2, 2, (3,), np.float64),
    Box(0, 9, (2,), np.int64),
    Tuple([Discrete(3), Box(-1, 1, (2,), np.float32)]),
    Dict({"b": Discrete(2), "a": Dict({"c": MultiBinary(2)})}),
]
ACTIONS = [
    Discrete(5, start=2),
    MultiDiscrete([2, 5, 3]),
    Box(-2, 3, (3,), np.float32),
    Box(-np.inf, np.inf, (2,), np.float32),
    Box(np.array([4.0, -np.inf], np.float32), np.array([np.inf, -7.0], np.float32)),
]


@pytest.mark.parametrize("space", OBSERVATIONS, ids=str)
@given(seed=st.integers(0, 1000))
def test_encode_obs_matches_gymnasium_flatten(space, seed):
    space.seed(seed)
    value = space.sample()
    stored = encoded_space(space)
    arrays = allocate(stored, 3)
    for row in range(3):  # rows are overwritten
        encode_obs(space, space.sample(), arrays, row)
    encode_obs(space, value, arrays, 1)
    leaves = named_leaves(arrays).values()
    parts = [leaf[1].flatten() for leaf in leaves]
    assert np.concatenate(parts).tolist() == np.float32(gymnasium.spaces.flatten(space, value)).tolist()
    assert all(leaf.dtype == np.float32 for leaf in leaves)


def test_encoded_space_of_uint8_image_is_unchanged():
    image = Box(0, 255, (4, 4, 3), np.uint8)
    assert encoded_space(image) == image
    assert allocate(image, 2).dtype == np.uint8


def test_encoded_space_bound_beyond_float32_becomes_infinite():
    space = encoded_space(Box(-1e300, 1e300, (1,), np.float64))
    assert (space.low, space.high) == (-np.inf, np.inf)


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_sample_action_is_in_space_and_depends_on_stream_only(space):
    stream = RandomStream(3, "actions")
    actions = sample_action(space, stream, 0, 500)
    assert all(space.contains(action) for action in actions.numpy())
    assert torch.equal(actions, sample_action(space, stream, 0, 500))
    assert not torch.equal(actions, sample_action(space, stream, 1, 500))
    assert not torch.equal(actions, sample_action(space, RandomStream(4, "actions"), 0, 500))


def test_sample_action_covers_all_choices_and_bounds():
    stream = RandomStream(0, "actions")
    assert sample_action(Discrete(5), stream, 0, 200).unique().tolist() == [0, 1, 2, 3, 4]
    assert sample_action(MultiDiscrete([2, 3]), stream, 0, 200).amax(dim=0).tolist() == [1, 2]
    pushes = sample_action(Box(-2, 3, (1,), np.float32), stream, 0, 500)
    assert pushes.min() < -1.9
    assert pushes.max() > 2.9


def test_policy_space_unsupported_space_raises_listing_supported():
    with pytest.raises(ConfigError, match="Discrete, MultiDiscrete, MultiBinary, a Box of floats"):
        policy_space(Box(0, 9, (2,), np.int64))
