"""Gymnasium spaces as tasks: action masks, mixed and binary actions, and stacked frames."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from helpers.gym_toys import Film, Workshop
from lockstep.action_encoding import split_actions, stored_space, unflatten_actions
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.space_layout import action_columns, network_space, policy_obs, refuse_critic_part, split_mask
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.gym.spaces import actions_valid, env_actions, policy_space, sample_action
from lockstep.tasks.gym.wrappers import FrameStack, flatten_mask

CPU = torch.device("cpu")
MIXED = [
    Workshop.action_space,
    Tuple([Discrete(4, start=-2), Box(-1, 1, (2, 2), np.float32)]),
    Tuple([Discrete(4), MultiBinary(3)]),
    Dict({"a": Box(-1, 1, (1,), np.float32), "b": Dict({"c": Box(0, 9, (2,), np.float64)})}),
]


def build(id, lanes=range(2), **settings):
    return GymConfig(id=id, **{"num_envs": 4, **settings}).build(Lanes(2, lanes, 0), CPU)


# Removed and converted parts


def test_text_is_removed_with_a_warning():
    with pytest.warns(UserWarning, match="does not see the text in mission"):
        envs = build("LockstepFilm-v0", env_kwargs={"form": "text"})
    assert list(envs.observation_space) == ["film"]
    assert envs.reset()["film"].dtype == torch.uint8


@pytest.mark.filterwarnings("ignore:.*does not see the text")
def test_float_obs_converts_bytes_but_not_the_action_mask():
    symbols = build("LockstepFilm-v0", env_kwargs={"form": "text"}, float_obs=True)
    assert symbols.observation_space["film"] == Box(0, 255, (7, 7, 3), np.float32)
    frames = [env.unwrapped.frame for env in symbols._envs.envs]
    assert torch.equal(symbols.observations()["film"], torch.from_numpy(np.stack(frames)).float())
    masked = build("LockstepVault-v0", env_kwargs={"where": "obs"}, float_obs=True)
    assert masked.observation_space["action_mask"].dtype == np.uint8
    assert check_env(GymConfig(id="LockstepFilm-v0", env_kwargs={"form": "text"}, float_obs=True), 40) == []


# Action masks


@pytest.mark.parametrize("where", ["info", "obs"])
@pytest.mark.parametrize("parts", [1, 2])
def test_action_mask_is_part_of_observations(where, parts):
    envs = build("LockstepVault-v0", env_kwargs={"where": where, "parts": parts})
    name = "sight" if where == "obs" else "observation"
    assert list(envs.observation_space) == [name, "action_mask"]
    assert envs.observation_space["action_mask"] == Box(0, 1, (6 * parts,), np.uint8)
    for _ in range(7):
        mask = envs.observations()["action_mask"]
        assert mask.dtype == torch.uint8
        assert ((mask.view(4, parts, 6).sum(2) >= 2) & (mask.view(4, parts, 6).sum(2) <= 3)).all()
        expected = [env.unwrapped.mask.tolist() for env in envs._envs.envs]
        assert mask.tolist() == expected
        legal = mask.view(4, parts, 6).argmax(2)
        envs.step(legal[:, 0] if parts == 1 else legal)  # the environment raises if one is illegal


@pytest.mark.parametrize("where", ["info", "obs"])
def test_use_action_mask_false_removes_mask(where):
    envs = build("LockstepVault-v0", env_kwargs={"where": where}, use_action_mask=False)
    leaves = named_leaves(envs.reset())
    assert not [name for name in leaves if "action_mask" in name]


def test_environment_without_mask_is_unchanged():
    assert build("CartPole-v1").observation_space.shape == (4,)


@pytest.mark.parametrize("workers", [0, 2])
def test_mask_without_legal_action_raises_error_with_environment(workers):
    envs = build("helpers.gym_toys:LockstepSealed-v0", num_workers=workers)
    with pytest.raises(ConfigError, match=r"LockstepSealed-v0 has no legal action(.|\n)*End the episode"):
        envs.step(torch.zeros(4, dtype=torch.int64))
    envs.close()


def test_flatten_mask_accepts_forms_of_gymnasium():
    assert flatten_mask(Discrete(3), np.array([1, 0, 1], np.int8)).tolist() == [True, False, True]
    parts = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    assert flatten_mask(MultiDiscrete([2, 3]), parts).tolist() == [True, False, False, True, True]
    mixed = Dict({"move": Box(-1, 1, (2,), np.float32), "pair": Tuple([Discrete(2), Discrete(2)])})
    assert flatten_mask(mixed, {"pair": (np.array([0, 1]), None)}).tolist() == [False, True, True, True]
    assert flatten_mask(mixed, None).tolist() == [True] * 4


def test_network_space_rejects_mask_of_other_size_or_dtype():
    def dict_with(mask):
        return Dict({"sight": Box(0, 1, (2,), np.float32), "action_mask": mask})

    fitting = dict_with(Box(0, 1, (3,), np.uint8))
    assert network_space(fitting, 3) == Box(0, 1, (2,), np.float32)
    for wrong in (Box(0, 1, (4,), np.uint8), Box(0, 1, (3,), np.float32)):
        with pytest.raises(ConfigError, match=r"3 discrete choices.\nMake it Box\(0, 1, \(3,\), np.uint8\)"):
            network_space(dict_with(wrong), 3)
    with pytest.raises(ConfigError, match="continuous actions have no mask"):
        network_space(fitting, 0)
    with pytest.raises(ConfigError, match="no part but action_mask"):
        network_space(Dict({"action_mask": Box(0, 1, (3,), np.uint8)}), 3)


def test_policy_obs_removes_the_critic_part_only():
    obs = {"a": torch.zeros(1)}
    assert policy_obs(obs) is obs
    assert policy_obs(obs | {"critic": obs}) == obs  # a part that remains alone stays in its dict
    space = Dict([("b", Box(0, 1, (2,), np.float32)), ("a", Box(0, 1, (1,), np.float32))])
    assert policy_obs(space) is space
    assert list(policy_obs(Dict([*space.items(), ("critic", space)])).items()) == list(space.items())
    refuse_critic_part(space, "SAC")
    with pytest.raises(ConfigError, match="SAC does not support the part critic"):
        refuse_critic_part(Dict({"a": space, "critic": space}), "SAC")


def test_split_mask_keeps_dicts_without_mask_and_unwraps_single_part():
    obs = {"a": torch.zeros(1)}
    assert split_mask(obs) == (obs, None)
    mask = torch.ones(1)
    assert split_mask(obs | {"action_mask": mask}) == (obs["a"], mask)
    assert list(split_mask(obs | {"b": mask, "action_mask": mask})[0]) == ["a", "b"]


# Mixed and binary actions


@pytest.mark.parametrize("space", MIXED, ids=str)
def test_mixed_actions_reach_environment_in_its_form(space):
    policy = policy_space(space)
    actions = sample_action(policy, RandomStream(0, "actions"), 0, 50)
    assert actions.shape == (50, len(action_columns(space)))
    assert actions.is_floating_point() == (0 in action_columns(space))
    rows = env_actions(space, actions.numpy())
    assert actions_valid(stored_space(space), rows)
    given = split_actions(space, rows)
    assert all(space.contains(action) for action in given)
    batch = unflatten_actions(space, rows)
    first = given[0]
    while isinstance(batch, dict | tuple):
        key = next(iter(batch)) if isinstance(batch, dict) else 0
        batch, first = batch[key], first[key]
    assert np.array_equal(batch[0], first)
    assert len({str(action) for action in given}) > 10  # they differ


def test_mixed_actions_are_clipped_and_invalid_saved_actions_are_found():
    space = Workshop.action_space
    rows = env_actions(space, np.array([[9.0, -9.0, 2.0, 1.0, 0.0, 1.0, 2.0]], np.float32))
    (action,) = split_actions(space, rows)
    assert action["push"].tolist() == [2.0, -2.0]
    assert action["tool"] == 3
    assert (action["rest"][0].tolist(), action["rest"][1].tolist()) == ([[1], [0]], [1, 2])
    rows[0, 2] = 4
    assert not actions_valid(stored_space(space), rows)


def test_multi_binary_and_matrix_actions_become_multi_discrete():
    assert policy_space(MultiBinary((2, 2))) == MultiDiscrete([2] * 4)
    assert policy_space(MultiDiscrete([[2, 3], [4, 5]])) == MultiDiscrete([2, 3, 4, 5])
    found = env_actions(MultiBinary((2, 2)), np.array([[1, 0, 0, 1]]))
    assert (found.tolist(), found.dtype) == ([[[1, 0], [0, 1]]], np.int8)
    assert actions_valid(MultiBinary((2, 2)), found)
    assert not actions_valid(MultiBinary((2, 2)), found + np.int8(1))


@pytest.mark.parametrize("space", [Dict({}), Tuple([]), Tuple([Box(0, 9, (2,), np.int64)]), gymnasium.spaces.Text(3)])
def test_policy_space_rejects_parts_that_policies_do_not_support(space):
    with pytest.raises(ConfigError, match="MultiBinary, a Box of floats, or a Dict or Tuple of them"):
        policy_space(space)


# Frame stacking


@pytest.mark.parametrize(
    ("form", "shape"),
    [("vector", (6,)), ("gray", (3, 9, 8)), ("color", (9, 9, 8)), ("planes", (9, 5, 6)), ("dict", (6,))],
)
def test_frame_stack_joins_last_observations(form, shape):
    env = FrameStack(Film(form), "Film", 3)
    space = env.observation_space["film"] if form == "dict" else env.observation_space
    assert space.shape == shape
    obs, _ = env.reset(seed=0)
    first = env.unwrapped.time
    for count in range(4):
        assert env.observation_space.contains(obs)
        film = obs["film"] if form == "dict" else obs
        times = film.reshape(3, -1)
        assert times.min(1).tolist() == times.max(1).tolist()
        assert times[:, 0].tolist() == [max(first, first + count - age) for age in (2, 1, 0)]
        if form == "dict":
            assert obs["action_mask"].tolist() == [1, (first + count) % 2]
        env.unwrapped.frame[:] = 0  # the environment may reuse its buffer
        obs, *_ = env.step(0)
    obs, _ = env.reset(seed=1)
    assert np.unique(obs["film"] if form == "dict" else obs).tolist() == [env.unwrapped.time]


def test_frame_stack_rejects_observation_without_frames():
    with pytest.raises(ConfigError, match=r"frame-stack is 3, but LockstepFilm-v0 observes Discrete"):
        build("LockstepFilm-v0", frame_stack=3, env_kwargs={"form": "number"})
    with pytest.raises(ConfigError, match="Use 1 to 64 frames"):
        GymConfig(frame_stack=0)


# The contract of environments, with restores: actions and frames are part of what is replayed


@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("LockstepVault-v0", {"env_kwargs": {"where": "info"}}),
        ("LockstepVault-v0", {"env_kwargs": {"where": "obs", "parts": 2}}),
        ("LockstepWorkshop-v0", {}),
        ("LockstepFilm-v0", {"frame_stack": 3, "env_kwargs": {"form": "dict"}}),
    ],
)
def test_task_with_mask_mixed_actions_or_frames_passes_check(id, settings):
    assert check_env(GymConfig(id=id, **settings), steps=40) == []
