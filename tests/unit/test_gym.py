"""Gymnasium environments as a task: seeds, forms, ends of episodes, and restoring by replay."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gym_toys import Diary
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from lockstep.config import ConfigError, coerce
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.gym.env import ActionLog, GymConfig
from lockstep.tasks.spaces import sample_action

CPU = torch.device("cpu")
ALL = range(8)


def build(id, lanes=ALL, seed=0, **settings):
    return GymConfig(id=id, **{"num_envs": 16, **settings}).build(Lanes(8, lanes, seed), CPU)


def play(envs, times, lanes=ALL):
    """The observations and rewards of a few steps; the actions depend on the global index and the time alone."""
    course = []
    for time in times:
        action = sample_action(envs.action_space, RandomStream(1, "actions"), time, 16)[
            lanes.start * 2 : lanes.stop * 2
        ]
        step = envs.step(action)
        course.append({**named_leaves(step.obs, "obs"), "reward": step.reward})
        course[-1] = {name: tensor.clone() for name, tensor in course[-1].items()}
    return course


def same(one, other, rows=slice(None)):
    return all(torch.equal(a[name][rows], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def save(envs, lanes=ALL):
    return {lane: envs.lane_state(lane) for lane in lanes}


def load(envs, saved):
    for lane, state in saved.items():
        envs.load_lane_state(lane, state)
    return envs


# Seeds and ends


def test_every_episode_has_a_seed_of_its_own_from_the_global_index_and_its_number():
    envs = build("LockstepDiary-v0", lanes=range(3, 6), seed=9)
    shown = [envs.reset()[:, 0].clone()]
    for _ in range(2):
        for _ in range(5):
            step = envs.step(torch.zeros(6, dtype=torch.int64))
        shown.append(step.obs[:, 0].clone())
    for episode, seeds in enumerate(shown):
        expected = [RandomStream(9, "gym", index).draw_seed(episode, bits=31) % 1000 for index in range(6, 12)]
        assert seeds.tolist() == expected


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "LockstepHouse-v0"])
def test_environments_play_the_same_whichever_lanes_are_hosted_together(id):
    whole, part = build(id), build(id, lanes=range(3, 6))
    whole.reset(), part.reset()
    assert same(play(whole, range(60)), play(part, range(60), range(3, 6)), slice(6, 12))


def test_an_episode_cut_off_shows_its_last_observation_and_then_the_first_of_the_next():
    envs = build("LockstepDiary-v0")
    seeds = envs.reset()[:, 0].clone()
    for time in range(4):
        step = envs.step(torch.zeros(16, dtype=torch.int64))
        assert not step.truncated.any()
        assert step.obs[:, 1].tolist() == [time + 1] * 16
    step = envs.step(torch.zeros(16, dtype=torch.int64))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert torch.equal(step.final_obs, torch.stack([seeds, torch.full((16,), 5.0)], dim=1))
    assert step.obs[:, 1].tolist() == [0] * 16
    assert not torch.equal(step.obs[:, 0], seeds)


def test_an_episode_that_ends_for_good_shows_where_it_ended():
    envs = build("CartPole-v1")
    envs.reset()
    ended = 0
    for _ in range(30):
        step = envs.step(torch.zeros(16, dtype=torch.int64))  # always pushed left, the pole falls
        assert not step.truncated.any()
        ended += int(step.terminated.sum())
        assert (step.final_obs[step.terminated][:, 2].abs() > 0.2095).all()
        assert (step.obs[step.terminated].abs() <= 0.05).all()
    assert ended >= 32


# Forms


def test_observations_by_name_keep_their_names_and_become_what_a_network_reads():
    envs = build("LockstepHouse-v0")
    obs = named_leaves(envs.reset())
    forms = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in obs.items()}
    assert forms == {
        "body.joints": (torch.float32, (16, 2)),
        "camera": (torch.uint8, (16, 2, 2, 3)),
        "room": (torch.float32, (16, 3)),
    }
    assert torch.equal(obs["room"].argmax(dim=1), obs["camera"][:, 0, 0, 0].long() - 100)
    assert obs["room"].sum(dim=1).tolist() == [1.0] * 16
    assert {name: space.shape for name, space in envs.observation_space["body"].items()} == {"joints": (2,)}
    assert envs.observation_space["room"] == Box(0, 1, (3,), np.float32)
    assert envs.action_space == MultiDiscrete([3, 4])


def test_continuous_actions_are_clipped_to_their_bounds_and_choices_count_from_zero():
    springs = build("LockstepSpring-v0")
    springs.reset()
    assert springs.action_space.dtype == np.float32
    assert springs.step(torch.full((16, 1), 3.0)).obs.tolist() == [[0.5]] * 16
    diaries = build("LockstepDiary-v0")
    diaries.reset()
    assert diaries.action_space == Discrete(2)
    assert diaries.step(torch.tensor([0, 1] * 8)).reward.tolist() == [5.0, 6.0] * 8


def test_step_fills_the_same_memory_each_time_and_observe_shows_it():
    envs = build("CartPole-v1")
    first = envs.reset()
    step = envs.step(torch.zeros(16, dtype=torch.int64))
    assert step.obs.data_ptr() == first.data_ptr() == envs.observations().data_ptr()
    assert step.final_obs.data_ptr() != step.obs.data_ptr()


def test_the_wrong_number_of_actions_is_an_error():
    envs = build("CartPole-v1")
    envs.reset()
    with pytest.raises(ValueError, match="15 actions were given to 16"):
        envs.step(torch.zeros(15, dtype=torch.int64))


# Restoring


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "LockstepHouse-v0", "LockstepSpring-v0"])
@pytest.mark.parametrize("dirty", [False, True], ids=["fresh", "dirty"])
def test_a_run_restored_in_mid_episode_on_other_lanes_goes_on_as_if_nothing_had_been(id, dirty):
    whole = build(id)
    whole.reset()
    play(whole, range(33))
    lanes = range(2, 7)
    saved = save(whole, lanes)
    restored = build(id, lanes=lanes)
    if dirty:
        restored.reset()
        play(restored, range(40, 55), lanes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(restored, saved)
        now = named_leaves(restored.observations())
    for name, obs in named_leaves(whole.observations()).items():
        assert torch.equal(obs[4:14], now[name])
    for lane, state in save(restored, lanes).items():
        assert state.keys() == saved[lane].keys()
        assert all(torch.equal(state[name], saved[lane][name]) for name in state)
    # Twice: the log that restoring left must itself be enough to restore from.
    again = load(build(id, lanes=lanes), save(restored, lanes))
    course = play(whole, range(33, 90))
    assert same(course, play(restored, range(33, 90), lanes), slice(4, 14))
    assert same(course, play(again, range(33, 90), lanes), slice(4, 14))


def test_a_state_is_small_named_tensors_that_later_steps_leave_alone():
    envs = build("LockstepHouse-v0")
    envs.reset()
    play(envs, range(7))
    state = envs.lane_state(3)
    assert set(state) == {"episode", "steps", "logged", "actions", "obs.body.joints", "obs.camera", "obs.room"}
    assert state["actions"].shape == (int(state["logged"].sum()), 2)
    before = {name: tensor.clone() for name, tensor in state.items()}
    play(envs, range(7, 14))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_an_environment_that_is_not_deterministic_begins_its_next_episode_and_the_run_says_so_once():
    envs = build("LockstepWhim-v0")
    envs.reset()
    play(envs, range(4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restored = load(build("LockstepWhim-v0"), save(envs))
        restored.observations()
        play(restored, range(2))
    assert len(told) == 1
    assert "LockstepWhim-v0: 16 of the 16 environments here could not be restored" in str(told[0].message)
    assert "They began their next episode instead" in str(told[0].message)
    state = restored.lane_state(0)
    assert state["episode"].tolist() == [1, 1]
    assert state["steps"].tolist() == [2, 2]


def test_a_replay_that_ends_early_begins_the_next_episode():
    envs = build("LockstepDiary-v0")
    envs.reset()
    play(envs, range(3))
    restored = load(build("LockstepDiary-v0", env_kwargs={"max_episode_steps": 2}), save(envs))
    with pytest.warns(UserWarning, match="16 of the 16"):
        restored.observations()
    assert restored.lane_state(7)["episode"].tolist() == [1, 1]
    assert restored.lane_state(7)["steps"].tolist() == [0, 0]


def test_an_episode_longer_than_the_cap_starts_anew_and_the_others_are_restored():
    envs = build("CartPole-v1", max_replay_steps=20)
    envs.reset()
    play(envs, range(25))
    saved = save(envs)
    steps, episodes = (torch.cat([state[name] for state in saved.values()]) for name in ("steps", "episode"))
    long = steps > 20
    assert 0 < long.sum() < 16
    restored = load(build("CartPole-v1", max_replay_steps=20), saved)
    with pytest.warns(UserWarning, match=f"{long.sum()} of the 16 environments here .* max_replay_steps \\(20\\)"):
        obs = restored.observations()
    now = save(restored)
    assert torch.equal(torch.cat([state["episode"] for state in now.values()]), episodes + long)
    assert torch.equal(torch.cat([state["steps"] for state in now.values()]), steps * ~long)
    assert torch.equal(obs[~long], envs.observations()[~long])


def test_an_episode_without_its_actions_is_not_taken_for_restored_because_it_looks_right():
    envs = build("LockstepWall-v0", max_replay_steps=3)
    envs.reset()
    play(envs, range(4))
    restored = load(build("LockstepWall-v0", max_replay_steps=3), save(envs))
    with pytest.warns(UserWarning, match="16 of the 16"):
        restored.observations()


def test_the_log_reaches_back_to_the_longest_episode_and_no_further():
    log = ActionLog(Discrete(9), count=2, cap=4)
    for time, longest in enumerate([1, 2, 3, 1, 2]):
        log.append(np.array([time, -time]), longest)
    assert len(log._steps) == 2
    assert log.last(1, 2).tolist() == [-3, -4]
    assert log.last(0, 0).shape == (0,)
    log.put(0, np.array([7, 8, 9]))
    assert log.last(0, 3).tolist() == [7, 8, 9]
    assert log.last(1, 2).tolist() == [-3, -4]
    for time in range(9):
        log.append(np.array([time, time]), longest=100)
    assert len(log._steps) == 4


def test_a_state_of_another_number_of_environments_is_refused():
    envs = build("CartPole-v1", num_envs=32)
    envs.reset()
    with pytest.raises(ValueError, match="CartPole-v1, lane 0: episode was saved as"):
        build("CartPole-v1").load_lane_state(0, envs.lane_state(0))


# Settings


@pytest.mark.parametrize(
    ("id", "sentence"),
    [
        ("CartPol-v1", "CartPol-v1 is not a registered environment.\nDid you mean CartPole-v1"),
        ("Nothing/Like-It-v3", "Write the id of another package's environment with its module"),
        ("no_such_package:Name-v0", "no_such_package:Name-v0 needs a package that is not installed"),
    ],
)
def test_an_id_that_cannot_be_made_is_answered_with_what_to_do(id, sentence):
    with pytest.raises(ConfigError) as error:
        build(id)
    assert sentence in str(error.value)


def test_a_missing_extra_is_answered_with_what_to_install():
    def needs_an_engine(**kwargs):
        raise gymnasium.error.DependencyNotInstalled('Engine is missing, run `pip install "gymnasium[engine]"`')

    gymnasium.register("LockstepEngine-v0", needs_an_engine)
    with pytest.raises(ConfigError, match=r"LockstepEngine-v0 needs a package.*\n.*gymnasium\[engine\]"):
        build("LockstepEngine-v0")


def test_an_unknown_option_is_answered_with_its_name():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'gravity'"):
        build("Pendulum-v1", env_kwargs={"gravity": 1})


def test_a_space_that_no_network_reads_is_refused():
    class Story(Diary):
        observation_space = gymnasium.spaces.Text(9)

    gymnasium.register("LockstepStory-v0", Story)
    with pytest.raises(ConfigError, match="cannot be stored as a tensor"):
        build("LockstepStory-v0")


def test_options_reach_the_environment_and_keep_their_types_through_a_yaml_file():
    kinds = GymConfig.__dataclass_fields__["env_kwargs"].type
    read = coerce({"g": 0.5, "n": 3, "slow": True, "map": "4x4"}, kinds, "env_kwargs")
    assert read == {"g": 0.5, "n": 3, "slow": True, "map": "4x4"}
    assert [type(value) for value in read.values()] == [float, int, bool, str]
    assert build("Pendulum-v1", env_kwargs={"g": 0.5})._envs.envs[0].unwrapped.g == 0.5


def test_environments_that_lanes_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="num_envs is 12, which 8 lanes cannot share evenly"):
        build("CartPole-v1", num_envs=12)


# Watching


def test_text_is_the_environments_own_where_it_has_one_and_a_line_of_numbers_elsewhere():
    lake, cart = build("FrozenLake-v1"), build("CartPole-v1")
    lake.reset(), cart.reset()
    assert "FHFH" in lake.render_text(0)
    assert lake._envs.envs[0].unwrapped.render_mode == "rgb_array"
    cart.step(torch.zeros(16, dtype=torch.int64))
    assert cart.render_text(3).startswith("CartPole-v1  step 1  return 1.0  obs [")


def test_a_frame_is_a_picture_and_changes_as_the_episode_goes_on():
    pytest.importorskip("pygame")
    envs = build("CartPole-v1")
    envs.reset()
    before = envs.render(0)
    for _ in range(5):
        envs.step(torch.zeros(16, dtype=torch.int64))
    assert before.dtype == np.uint8
    assert before.shape == (400, 600, 3)
    assert (envs.render(0) != before).any()


def test_an_environment_without_pictures_says_so():
    with pytest.raises(ConfigError, match="cannot draw pictures"):
        build("LockstepDiary-v0").render(0)


# Velocities


@pytest.mark.parametrize(
    ("id", "velocities"),
    [("CartPole-v1", [1, 3]), ("Pendulum-v1", [2]), ("Acrobot-v1", [4, 5]), ("MountainCar-v0", [1])],
)
def test_velocities_are_hidden_and_all_else_is_as_it_was(id, velocities):
    masked, plain = (build(id=id, num_envs=8, mask_velocity=mask) for mask in (True, False))
    stream = RandomStream(0, "test")
    for env in (masked, plain):
        env.reset()
    for count in range(30):
        action = sample_action(plain.action_space, stream, count, 8)
        seen, true = masked.step(action), plain.step(action)
        assert torch.equal(seen.reward, true.reward)
        assert not seen.obs[:, velocities].any()
        assert true.obs[:, velocities].all()
        shown = [place for place in range(true.obs.shape[1]) if place not in velocities]
        assert torch.equal(seen.obs[:, shown], true.obs[:, shown])


def test_a_task_whose_velocities_are_not_known_is_named():
    with pytest.raises(ConfigError, match="which features of Taxi-v3 are velocities is not known"):
        build(id="Taxi-v3", num_envs=8, mask_velocity=True)
