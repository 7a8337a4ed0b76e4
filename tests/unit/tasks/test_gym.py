"""Gymnasium environments as a task: seeds, encoding, episode ends, and restoring by replay."""

import os
import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from helpers.gym_toys import Diary
from lockstep.config import ConfigError, coerce
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.gym.replayed_envs import ActionLog
from lockstep.tasks.gym.spaces import sample_action

CPU = torch.device("cpu")
ALL = range(8)


def build(id, lanes=ALL, seed=0, **settings):
    return GymConfig(id=id, **{"num_envs": 16, **settings}).build(Lanes(8, lanes, seed), CPU)


def play(envs, times, lanes=ALL):
    """Observations and rewards of a few steps. Actions depend only on the global env index and the time."""
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


# Seeds and episode ends


def test_episode_seed_depends_on_global_env_index_and_episode_number():
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
def test_step_results_do_not_depend_on_which_lanes_are_local(id):
    whole, part = build(id), build(id, lanes=range(3, 6))
    whole.reset(), part.reset()
    assert same(play(whole, range(60)), play(part, range(60), range(3, 6)), slice(6, 12))


def test_truncated_episode_returns_final_obs_and_reset_obs():
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


def test_terminated_episode_returns_final_obs_and_reset_obs():
    envs = build("CartPole-v1")
    envs.reset()
    ended = 0
    for _ in range(30):
        step = envs.step(torch.zeros(16, dtype=torch.int64))  # constantly pushed left, the pole falls
        assert not step.truncated.any()
        ended += int(step.terminated.sum())
        assert (step.final_obs[step.terminated][:, 2].abs() > 0.2095).all()
        assert (step.obs[step.terminated].abs() <= 0.05).all()
    assert ended >= 32


# Observation and action encoding


def test_dict_observations_keep_keys_and_are_encoded_for_networks():
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


def test_box_actions_are_clipped_and_discrete_actions_are_shifted_to_start():
    springs = build("LockstepSpring-v0")
    springs.reset()
    assert springs.action_space.dtype == np.float32
    assert springs.step(torch.full((16, 1), 3.0)).obs.tolist() == [[0.5]] * 16
    diaries = build("LockstepDiary-v0")
    diaries.reset()
    assert diaries.action_space == Discrete(2)
    assert diaries.step(torch.tensor([0, 1] * 8)).reward.tolist() == [5.0, 6.0] * 8


def test_step_reuses_observation_buffer():
    envs = build("CartPole-v1")
    first = envs.reset()
    step = envs.step(torch.zeros(16, dtype=torch.int64))
    assert step.obs.data_ptr() == first.data_ptr() == envs.observations().data_ptr()
    assert step.final_obs.data_ptr() != step.obs.data_ptr()


def test_step_wrong_number_of_actions_raises():
    envs = build("CartPole-v1")
    envs.reset()
    with pytest.raises(ValueError, match="15 actions were given to 16"):
        envs.step(torch.zeros(15, dtype=torch.int64))


# Restoring


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "LockstepHouse-v0", "LockstepSpring-v0"])
@pytest.mark.parametrize("dirty", [False, True], ids=["fresh", "dirty"])
def test_restore_mid_episode_on_other_lanes_continues_identically(id, dirty):
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
    # Restore twice: the action log left by a restore must be complete enough to restore from.
    again = load(build(id, lanes=lanes), save(restored, lanes))
    course = play(whole, range(33, 90))
    assert same(course, play(restored, range(33, 90), lanes), slice(4, 14))
    assert same(course, play(again, range(33, 90), lanes), slice(4, 14))


def test_lane_state_is_compact_and_not_aliased_by_later_steps():
    envs = build("LockstepHouse-v0")
    envs.reset()
    play(envs, range(7))
    state = envs.lane_state(3)
    assert set(state) == {"episode", "steps", "logged", "actions", "obs.body.joints", "obs.camera", "obs.room"}
    assert state["actions"].shape == (int(state["logged"].sum()), 2)
    before = {name: tensor.clone() for name, tensor in state.items()}
    play(envs, range(7, 14))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_restore_of_nondeterministic_env_starts_next_episode_and_warns_once():
    envs = build("LockstepWhim-v0")
    envs.reset()
    play(envs, range(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = load(build("LockstepWhim-v0"), save(envs))
        restored.observations()
        play(restored, range(2))
    assert len(caught) == 1
    assert "LockstepWhim-v0: 16 of the 16 environments of this process could not be restored" in str(caught[0].message)
    assert "They start their next episode instead" in str(caught[0].message)
    state = restored.lane_state(0)
    assert state["episode"].tolist() == [1, 1]
    assert state["steps"].tolist() == [2, 2]


def test_restore_with_early_end_in_replay_starts_next_episode():
    envs = build("LockstepDiary-v0")
    envs.reset()
    play(envs, range(3))
    restored = load(build("LockstepDiary-v0", env_kwargs={"max_episode_steps": 2}), save(envs))
    with pytest.warns(UserWarning, match="16 of the 16"):
        restored.observations()
    assert restored.lane_state(7)["episode"].tolist() == [1, 1]
    assert restored.lane_state(7)["steps"].tolist() == [0, 0]


def test_restore_of_episode_above_max_replay_steps_starts_next_episode():
    envs = build("CartPole-v1", max_replay_steps=20)
    envs.reset()
    play(envs, range(25))
    saved = save(envs)
    steps, episodes = (torch.cat([state[name] for state in saved.values()]) for name in ("steps", "episode"))
    long = steps > 20
    assert 0 < long.sum() < 16
    restored = load(build("CartPole-v1", max_replay_steps=20), saved)
    with pytest.warns(
        UserWarning, match=f"{long.sum()} of the 16 environments of this process .* max_replay_steps \\(20\\)"
    ):
        obs = restored.observations()
    now = save(restored)
    assert torch.equal(torch.cat([state["episode"] for state in now.values()]), episodes + long)
    assert torch.equal(torch.cat([state["steps"] for state in now.values()]), steps * ~long)
    assert torch.equal(obs[~long], envs.observations()[~long])


def test_restore_with_truncated_action_log_fails_despite_equal_observation():
    envs = build("LockstepWall-v0", max_replay_steps=3)
    envs.reset()
    play(envs, range(4))
    restored = load(build("LockstepWall-v0", max_replay_steps=3), save(envs))
    with pytest.warns(UserWarning, match="16 of the 16"):
        restored.observations()


def test_action_log_keeps_steps_of_longest_episode_up_to_cap():
    log = ActionLog(Discrete(9), count=2, max_steps=4)
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


def test_load_lane_state_with_other_env_count_raises():
    envs = build("CartPole-v1", num_envs=32)
    envs.reset()
    with pytest.raises(ValueError, match="CartPole-v1, lane 0: episode was saved as"):
        build("CartPole-v1").load_lane_state(0, envs.lane_state(0))


# Settings


@pytest.mark.parametrize(
    ("id", "sentence"),
    [
        ("CartPol-v1", "CartPol-v1 is not a registered environment.\nDid you mean CartPole-v1"),
        ("Nothing/Like-It-v3", "Prefix the id of another package's environment with its module"),
        ("no_such_package:Name-v0", "no_such_package:Name-v0 needs a package that is not installed"),
    ],
)
def test_invalid_env_id_raises_with_fix(id, sentence):
    with pytest.raises(ConfigError) as error:
        build(id)
    assert sentence in str(error.value)


def test_missing_dependency_raises_with_install_command():
    def needs_an_engine(**kwargs):
        raise gymnasium.error.DependencyNotInstalled('Engine is missing, run `pip install "gymnasium[engine]"`')

    gymnasium.register("LockstepEngine-v0", needs_an_engine)
    with pytest.raises(ConfigError, match=r"LockstepEngine-v0 needs a package.*\n.*gymnasium\[engine\]"):
        build("LockstepEngine-v0")


@pytest.mark.parametrize(
    ("id", "module", "extra"),
    [
        ("Hopper-v5", "mujoco", "mujoco"),
        ("Hopper-v5", "imageio", "mujoco"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("MinAtar/Breakout-v1", "minatar", "minatar"),
        ("MiniGrid-DoorKey-5x5-v0", "minigrid", "minigrid"),
    ],
)
def test_missing_package_raises_with_pip_command_of_extra(monkeypatch, id, module, extra):
    for name in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d"))]:
        monkeypatch.delitem(sys.modules, name)
    if module == "imageio":
        pytest.importorskip("mujoco")
    monkeypatch.setitem(sys.modules, module, None)  # its import raises
    with pytest.raises(ConfigError, match=rf"{id} needs a package.*\npip install 'lockstep-rl\[{extra}\]'$"):
        build(id)


def test_missing_package_for_rendering_raises_with_pip_command(monkeypatch):
    envs = build("CartPole-v1")
    envs.reset()
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ConfigError, match=r"to render images.*\npip install 'lockstep-rl\[gym\]'$"):
        envs.render(0)


@pytest.mark.parametrize(
    ("id", "package"),
    [
        ("Hopper-v5", "imageio"),
        ("LunarLander-v3", "Box2D"),
        ("ALE/Pong-v5", "ale_py"),
        ("MinAtar/Breakout-v1", "minatar"),
        ("MiniGrid-DoorKey-5x5-v0", "minigrid"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not see the text in mission")
def test_env_of_extra_steps(id, package):
    pytest.importorskip(package)
    envs = build(id, num_envs=8)
    envs.reset()
    [step] = play(envs, range(1), range(4))
    assert len(step["reward"]) == 8


def test_unknown_env_kwarg_raises_naming_it():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'gravity'"):
        build("Pendulum-v1", env_kwargs={"gravity": 1})


def test_unsupported_observation_space_raises():
    class Story(Diary):
        observation_space = gymnasium.spaces.Text(9)

    gymnasium.register("LockstepStory-v0", Story)
    with pytest.raises(ConfigError, match="cannot be stored as a tensor"):
        build("LockstepStory-v0")


def test_env_kwargs_keep_types_and_reach_environment():
    kinds = GymConfig.__dataclass_fields__["env_kwargs"].type
    read = coerce({"g": 0.5, "n": 3, "slow": True, "map": "4x4"}, kinds, "env_kwargs")
    assert read == {"g": 0.5, "n": 3, "slow": True, "map": "4x4"}
    assert [type(value) for value in read.values()] == [float, int, bool, str]
    assert build("Pendulum-v1", env_kwargs={"g": 0.5})._envs.envs[0].unwrapped.g == 0.5


def test_num_envs_not_divisible_by_lanes_raises():
    with pytest.raises(ConfigError, match="num_envs is 12, which 8 lanes cannot share evenly"):
        build("CartPole-v1", num_envs=12)


# Rendering


def test_render_text_uses_ansi_mode_or_falls_back_to_numbers():
    lake, cart = build("FrozenLake-v1"), build("CartPole-v1")
    lake.reset(), cart.reset()
    assert "FHFH" in lake.render_text(0)
    assert lake._envs.envs[0].unwrapped.render_mode == "rgb_array"
    cart.step(torch.zeros(16, dtype=torch.int64))
    assert cart.render_text(3).startswith("obs [")
    assert cart.render_title(3) == "CartPole-v1"


def test_render_returns_image_that_changes_with_steps():
    pytest.importorskip("pygame")
    envs = build("CartPole-v1")
    envs.reset()
    before = envs.render(0)
    for _ in range(5):
        envs.step(torch.zeros(16, dtype=torch.int64))
    assert before.dtype == np.uint8
    assert before.shape == (400, 600, 3)
    assert (envs.render(0) != before).any()


def test_max_episode_steps_is_the_limit_of_the_environment():
    assert build("CartPole-v1").max_episode_steps == 500
    assert build("CartPole-v1", env_kwargs={"max_episode_steps": 20}).max_episode_steps == 20


def test_render_without_display_prints_nothing():
    pytest.importorskip("pygame")
    code = (
        "import torch; from lockstep.lanes import Lanes; from lockstep.tasks.gym.env import GymConfig; "
        "env = GymConfig(num_envs=1).build(Lanes(1, range(1), 0), torch.device('cpu')); env.reset(); env.render(0)"
    )
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_render_unsupported_env_raises():
    with pytest.raises(ConfigError, match="cannot render images"):
        build("LockstepDiary-v0").render(0)


# Velocity masking


@pytest.mark.parametrize(
    ("id", "velocities"),
    [("CartPole-v1", [1, 3]), ("Pendulum-v1", [2]), ("Acrobot-v1", [4, 5]), ("MountainCar-v0", [1])],
)
def test_mask_velocity_zeroes_velocities_and_nothing_else(id, velocities):
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


def test_mask_velocity_for_unknown_env_raises_naming_it():
    with pytest.raises(ConfigError, match="the velocities in the observations of Taxi-v3 are not known"):
        build(id="Taxi-v3", num_envs=8, mask_velocity=True)


def test_image_of_grid_is_visible():
    """MinAtar renders a pixel for each cell, as numbers from 0 to 1."""
    pytest.importorskip("minatar")
    envs = build("MinAtar/Breakout-v1")
    envs.reset()
    image = envs.render(0)
    assert image.dtype == np.uint8
    assert image.shape == (240, 240, 3)
    assert image.max() > 100
