"""Batched simulators: both forms, one instance per lane, last observations, saved state, groups and errors."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from helpers import sim_toys
from lockstep.clock import TrainState
from lockstep.config import ConfigError, apply_overrides
from lockstep.inference import load_recipe
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.registry import find_recipe
from lockstep.run_dir import to_yaml
from lockstep.space_layout import policy_obs
from lockstep.tasks.simulators.env import SimulatorConfig, SimulatorEnvs
from lockstep.tasks.simulators.observations import ObsGroups

LANES, ENVS, STEPS = 4, 3, 15
FORMS = {"rsl_rl": "make_short", "old rsl_rl": "make_old", "mjlab": "make_mjlab", "ManiSkill": "make_gym"}
WITH_STATE = {name: make for name, make in FORMS.items() if name != "old rsl_rl"}


def build(make, lanes=range(LANES), seed=0, **settings):
    config = SimulatorConfig(make=f"helpers.sim_toys:{make}", num_envs=LANES * ENVS, **settings)
    return config.build(Lanes(LANES, lanes, seed), torch.device("cpu"))


def actions(time):
    return torch.randn(LANES * ENVS, 2, generator=torch.Generator().manual_seed(time))


def trace(envs, times, rows=slice(None)):
    """Step, and return everything that is defined of each step."""
    found = []
    for time in times:
        step = envs.step(actions(time)[rows])
        ended = step.terminated | step.truncated
        values = named_leaves(step.obs, "obs") | {"reward": step.reward, "end": step.terminated, "cut": step.truncated}
        values |= {name: x[ended] for name, x in named_leaves(step.final_obs, "final").items()}
        found.append({name: x.clone() for name, x in (values | step.episode_info).items()})
    return found


def assert_equal(one, other):
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_lanes_do_not_depend_on_the_process_that_hosts_them(make):
    whole, part = build(make), build(make, range(1, 3))
    rows = slice(ENVS, 3 * ENVS)
    for mine, all_lanes in zip(trace(part, range(STEPS), rows), trace(whole, range(STEPS)), strict=True):
        for name in ("reward", "end", "cut", *named_leaves(part.observations(), "obs")):
            assert torch.equal(mine[name], all_lanes[name][rows])
    assert whole.max_episode_steps in (None, sim_toys.LENGTH)
    for lane in (1, 2):
        saved, same = part.lane_state(lane), whole.lane_state(lane)
        assert saved.keys() == same.keys()
        assert all(torch.equal(saved[name], same[name]) for name in saved)
    seen = whole.observations()
    assert len({tuple(row.tolist()) for row in next(iter(seen.values()))}) == LANES * ENVS  # lanes have their own seed


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_reset_starts_the_first_episodes_again(make):
    envs = build(make)
    first = {name: x.clone() for name, x in named_leaves(envs.reset()).items()}
    before = trace(envs, range(3))
    assert_equal([first], [named_leaves(envs.reset())])
    assert_equal(trace(envs, range(3)), before)


@pytest.mark.parametrize("make", WITH_STATE.values(), ids=WITH_STATE)
def test_restored_simulator_continues_equally(make):
    saved, fresh = build(make), build(make)
    trace(saved, range(STEPS))
    trace(fresh, range(3))
    state = {lane: saved.lane_state(lane) for lane in range(LANES)}
    expected = trace(saved, range(STEPS, 2 * STEPS))
    for lane, tensors in state.items():
        fresh.load_lane_state(lane, tensors)
    assert_equal([state[1]], [fresh.lane_state(1)])
    assert_equal(trace(fresh, range(STEPS, 2 * STEPS)), expected)
    with pytest.raises(ValueError, match="does not match this configuration"):
        fresh.load_lane_state(0, state[0] | {"more": torch.zeros(1)})


def test_simulator_without_state_starts_new_episodes_and_says_so():
    saved = build("make_old")
    trace(saved, range(STEPS))
    state = {lane: saved.lane_state(lane) for lane in range(LANES)}
    restored = []
    for steps in (0, 4):
        fresh = build("make_old")
        trace(fresh, range(steps))
        for lane, tensors in state.items():
            fresh.load_lane_state(lane, tensors)
        with pytest.warns(UserWarning, match=r"cannot restore its state \(get_state and set_state\), so the 12 env"):
            restored.append(trace(fresh, range(5)))
        assert int(fresh.lane_state(0)["starts"]) == 1
    assert_equal(*restored)  # the seed is a function of the number of starts
    assert not torch.equal(restored[0][0]["obs.policy"], trace(build("make_old"), range(1))[0]["obs.policy"])


@pytest.mark.parametrize("make", WITH_STATE.values(), ids=WITH_STATE)
def test_final_obs_are_those_before_the_reset(make):
    envs, cuts = build(make), 0
    for time in range(STEPS):
        before = policy_part(envs.observations())
        step = envs.step(actions(time))
        ended = step.terminated | step.truncated
        cuts += int(step.truncated.sum())
        # The policy sees the offset of the target, which changes by 0.2 times the velocity after the step.
        expected = before[:, :2] - 0.2 * policy_part(step.final_obs)[:, 2:]
        torch.testing.assert_close(policy_part(step.final_obs)[ended, :2], expected[ended])
        assert not torch.isclose(policy_part(step.obs)[ended], policy_part(step.final_obs)[ended]).all(1).any()
    assert cuts
    envs.on_iteration_start(TrainState(total_samples=1))  # does not warn


def policy_part(obs):
    return next(iter(policy_obs(obs).values()))


def test_missing_final_obs_are_replaced_by_the_obs_before_the_step_with_a_warning():
    envs, clock = build("make_old"), TrainState(total_samples=1)
    envs.on_iteration_start(clock)
    for time in range(sim_toys.LENGTH):
        before = named_leaves(envs.observations())
        step = envs.step(actions(time))
    assert step.truncated.any()
    assert all(torch.equal(x, before[name]) for name, x in named_leaves(step.final_obs).items())
    with pytest.warns(UserWarning, match="bootstrapped from the observation before it"):
        envs.on_iteration_start(clock)
    trace(envs, range(STEPS))
    envs.on_iteration_start(clock)  # once


def test_ends_without_time_outs_are_terminal():
    envs = build("make_mjlab")
    step = envs.step(torch.full((LANES * ENVS, 2), 1.0))
    assert not step.truncated.any()


def test_metrics_of_extras_are_episode_info():
    keys = ("success", "Episode/reward", "absent")
    for make in FORMS.values():
        info = trace(build(make, info_keys=keys), range(sim_toys.LENGTH))[-1]
        assert info["absent"].isnan().all()
        assert info["Episode/reward"].eq(2.5).any() == (make == "make_mjlab")
        assert info["success"].isfinite().any() == (make != "make_old")


def test_actions_are_clipped_to_bounds():
    envs = build("make_gym")
    assert envs.action_space == Box(-0.5, 0.5, (2,), np.float32)
    envs.step(torch.full((LANES * ENVS, 2), 3.0))
    assert envs._simulators[0].simulator.taken.tolist() == [[0.5, 0.5]] * ENVS
    assert build("make_old").action_space == Box(-np.inf, np.inf, (2,), np.float32)
    limited = build("make_old", clip_actions=2.0)
    assert limited.action_space == Box(-2.0, 2.0, (2,), np.float32)
    with pytest.raises(ValueError, match="3 actions were given to 12"):
        limited.step(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("parts", "settings", "expected"),
    [
        ("policy critic", ((), ()), "policy critic"),
        ("actor critic extra", ((), ()), "actor critic"),  # rsl_rl does not use other groups by default
        ("state privileged_state", ((), ()), "state critic"),
        ("state rgb", ((), ()), "state rgb"),
        ("state", ((), ()), ""),
        ("a b c d", (("b", "a"), ("c", "d")), "b a critic.c critic.d"),
        ("policy critic", (("policy", "critic"), ("critic",)), "policy critic"),
    ],
)
def test_obs_groups_are_chosen_by_name_or_setting(parts, settings, expected):
    found = ObsGroups(*settings)({name: torch.zeros(2, 3) for name in parts.split()})
    assert " ".join(named_leaves(found)) == expected


def test_obs_are_float32_or_uint8_and_spaces_follow():
    obs = {"image": torch.zeros(2, 8, 8, 3, dtype=torch.uint8), "flag": torch.zeros(2, 1, dtype=torch.bool)}
    found = ObsGroups((), ())(sim_toys.Groups(obs))
    assert {name: x.dtype for name, x in found.items()} == {"image": torch.uint8, "flag": torch.float32}
    envs = build("make_mjlab")
    assert dict(envs.observation_space) == {
        "actor": Box(-np.inf, np.inf, (4,), np.float32),
        "critic": Box(-np.inf, np.inf, (5,), np.float32),
    }


@pytest.mark.parametrize(
    ("make", "settings", "problem"),
    [
        ("os:system", {"env_kwargs": {"command": "false"}}, "no parameter num_envs"),
        ("nothing", {}, "does not name a function"),
        ("there_is_none.py:make_env", {}, "there is no file"),
        ("there_is_none:make_env", {}, "there_is_none is not installed"),
        ("helpers.sim_toys:absent", {}, "has no absent"),
        ("helpers.sim_toys:LENGTH", {}, "is not a function"),
        ("helpers.sim_toys:make_old", {"env_kwargs": {"seed": 1}}, "Lockstep sets itself"),
        ("helpers.sim_toys:make_old", {"env_kwargs": {"sed": 1}}, "does not take(.|\n)*num_envs, device, seed"),
        (
            "helpers.sim_toys:make_old",
            {"policy_groups": ("vision",)},
            "name vision, but the simulator observes policy",
        ),
        ("helpers.sim_toys:make_wrong", {"env_kwargs": {"fault": "nothing"}}, "is no batched simulator"),
        ("helpers.sim_toys:make_wrong", {"env_kwargs": {"fault": "single"}}, "does not start the next episode"),
        ("helpers.sim_toys:make_wrong", {"env_kwargs": {"fault": "later"}}, "does not start the next episode"),
        ("helpers.sim_toys:make_wrong", {"env_kwargs": {"fault": "count"}}, "num_envs=3 and returned a simulator of 4"),
        ("helpers.sim_toys:make_wrong", {"env_kwargs": {"fault": "actions"}}, "are not supported by simulators"),
        ("helpers.sim_toys:make_wrong", {"env_kwargs": {"fault": "array"}}, "ndarray as an observation"),
    ],
)
def test_wrong_factory_or_simulator_is_refused_with_a_fix(make, settings, problem):
    config = SimulatorConfig(make=make, num_envs=LANES * ENVS, **settings)
    with pytest.raises(ConfigError, match=problem):
        config.build(Lanes(LANES, range(LANES), 0), torch.device("cpu"))


def test_factory_is_a_function_or_a_file_of_the_user(tmp_path, monkeypatch):
    assert SimulatorConfig(make=sim_toys.make_old).make == "helpers.sim_toys:make_old"
    file = tmp_path / "my_own_sim.py"
    file.write_text("from lockstep.tasks.simulators.point_mass import make_env\n")
    monkeypatch.chdir(tmp_path)
    config = SimulatorConfig(make="my_own_sim.py:make_env", num_envs=4).with_absolute_paths()
    assert config.code_file == file
    assert isinstance(config.build(Lanes(2, range(2), 0), torch.device("cpu")), SimulatorEnvs)
    with pytest.raises(ConfigError, match=r"clip_actions is 0\.0"):
        SimulatorConfig(clip_actions=0.0)


def test_factory_inside_an_untrusted_run_is_not_executed(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    recipe = apply_overrides(find_recipe("sim-ppo")(), {"task.make": f"{tmp_path / 'evil.py'}:make_env"})
    (tmp_path / "config.yaml").write_text(to_yaml(recipe))
    with pytest.raises(ConfigError, match="is a file inside it"):
        load_recipe(tmp_path)


def test_simulator_without_images_renders_text_only():
    envs = build("make_old")
    assert "obs.policy [" in envs.render_text(5)
    with pytest.raises(ConfigError, match="does not render images"):
        envs.render(0)
