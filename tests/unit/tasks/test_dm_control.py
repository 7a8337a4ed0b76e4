"""DeepMind Control Suite: names, episode lengths, action repeat, exact restore and multi-task."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from lockstep.cli.options import RecipeOptions, parse_recipe
from lockstep.cli.options import resolve as resolve_recipe
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.lanes import Lanes

pytest.importorskip("dm_control")

from lockstep.tasks.dm_control import suite
from lockstep.tasks.dm_control.env import DMControlConfig
from lockstep.tasks.dm_control.suite import SETS, VARIANTS, SimulatedTask, resolve
from lockstep.tasks.env_checker import check_env

CPU = torch.device("cpu")
DOMAINS = ("cartpole-swingup", "walker-run", "cup-catch", "hopper-hop", "acrobot-swingup")
TARGETS = ("reacher-easy", "finger-turn-hard", "fish-swim", "swimmer-swimmer6", "pointmass-hard")
"""Domains whose episodes write a target or a gain into the model."""


def build(*names, num_envs=8, lanes=None, **settings):
    lanes = lanes or Lanes(num_envs, range(num_envs), 0)
    return DMControlConfig(tasks=names, num_envs=num_envs, **settings).build(lanes, CPU)


def actions(world, count, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, world.actions))


# --------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("name", [*DOMAINS, *TARGETS])
def test_simulated_task_restore_continues_bit_identically(name):
    world, other = SimulatedTask(name, 2, None, False), SimulatedTask(name, 2, None, False)
    world.begin(7)
    other.begin(8)
    moves = actions(world, 60)
    for move in moves[:30]:
        last = world.act(move)
    for move in moves[:11]:
        other.act(move)
    other.restore(7, world.taken, world.physics(), *world.rng_state(), last.obs)
    assert other.taken == world.taken == 30
    for move in moves[30:]:
        one, two = world.act(move), other.act(move)
        assert one.obs.tobytes() == two.obs.tobytes()
        assert one.reward == two.reward
        assert world.physics().tobytes() == other.physics().tobytes()


def test_physics_get_state_alone_does_not_restore_exactly():
    """Shows that the test above detects a state that saves less."""
    world, other = SimulatedTask("walker-run", 2, None, False), SimulatedTask("walker-run", 2, None, False)
    world.begin(7)
    other.begin(7)
    moves = actions(world, 90)
    for move in moves[:60]:
        world.act(move)
    with other._env.physics.reset_context():
        other._env.physics.set_state(world._env.physics.get_state())
    for each in (world, other):
        each.act(moves[60])
    assert (world._env.physics.get_state() != other._env.physics.get_state()).any()


def test_simulated_task_restore_includes_random_generator():
    world, other = SimulatedTask("pendulum-swingup", 2, None, False), SimulatedTask("pendulum-swingup", 2, None, False)
    obs = world.begin(3)
    world._env.task.random.randn(5)  # draw within an episode; the generator caches half of a pair
    other.restore(3, 0, world.physics(), *world.rng_state(), obs)
    assert (world._env.task.random.randn(9) == other._env.task.random.randn(9)).all()


@pytest.mark.parametrize("broken", ["taken", "episode", "chance", "physics"])
def test_load_lane_state_invalid_state_raises(broken):
    env = build("pendulum-swingup", num_envs=1)
    env.reset()
    state = {name: tensor.clone() for name, tensor in env.lane_state(0).items()}
    state[broken].view(-1)[0] = torch.nan if broken == "physics" else -1
    with pytest.raises(ValueError, match="lane 0: the saved state is invalid"):
        env.load_lane_state(0, state)


@pytest.mark.slow  # tests/contract checks one task
def test_check_env_multi_task_has_no_faults():
    assert (
        check_env(
            DMControlConfig(tasks=("reacher-easy", "pendulum-swingup", "cup-spin"), episode_length=9, action_repeat=1),
            24,
        )
        == []
    )


# ------------------------------------------------------------------------------------------------------------- episodes


def test_episode_truncates_after_500_decisions_of_two_steps():
    world = SimulatedTask("pendulum-swingup", 2, None, False)
    world.begin(0)
    outcomes = [world.act(np.zeros(1)) for _ in range(500)]
    assert [o.ended for o in outcomes] == [False] * 499 + [True]
    assert not any(o.terminated for o in outcomes)
    assert world._env._step_count == 1000


def test_action_repeat_sums_rewards_of_repeated_steps():
    twice, once = SimulatedTask("cartpole-balance", 2, None, False), SimulatedTask("cartpole-balance", 1, None, False)
    twice.begin(5)
    once.begin(5)
    for _ in range(10):
        single = [once.act(np.array([0.3])) for _ in range(2)]
        double = twice.act(np.array([0.3]))
        assert double.reward == sum(o.reward for o in single)
        assert (double.obs == single[1].obs).all()


def test_actions_are_scaled_from_unit_range_to_task_bounds():
    world = SimulatedTask("pendulum-swingup", 1, None, False)
    given = []
    step = world._env.step
    world.begin(0)
    world._env.step = lambda action: (given.append(float(action[0])), step(action))[1]
    world._low, world._high = np.array([-3.0]), np.array([5.0])
    for action in (-2.0, -1.0, 0.0, 1.0):
        world.act(np.array([action]))
    assert given == [-3.0, -3.0, 1.0, 5.0]


def test_threads_do_not_change_results():
    plain, threaded = build("walker-run", num_envs=4), build("walker-run", num_envs=4, threads=2)
    plain.reset()
    threaded.reset()
    for number in range(20):
        action = torch.full((4, 6), (-1.0) ** number)
        one, two = plain.step(action), threaded.step(action)
        assert torch.equal(one.obs, two.obs)
        assert torch.equal(one.reward, two.reward)
    threaded.close()


# ----------------------------------------------------------------------------------------------------------- task names


def test_resolve_accepts_alternative_task_spellings():
    assert resolve(("cup-catch",)) == resolve(("ball_in_cup-catch",)) == ("cup-catch",)
    assert resolve(("Walker_Run", "humanoid-cmu-run")) == ("walker-run", "humanoid-cmu-run")


def test_resolve_unknown_or_duplicate_task_raises_with_fix():
    with pytest.raises(ConfigError, match=r"no task 'walker-rum'.\nDid you mean 'walker-run'\?"):
        resolve(("walker-rum",))
    with pytest.raises(ConfigError, match="Name each task once"):
        resolve(("walker-run", "walker-run"))


def test_resolve_mt30_gives_19_suite_tasks_and_11_variants():
    names = resolve(("mt30",))
    assert len(names) == len(set(names)) == 30
    assert [name in VARIANTS for name in names] == [False] * 19 + [True] * 11


def test_resolve_mt80_raises():
    with pytest.raises(
        ConfigError, match=r"mt80 needs the 50 tasks of Meta-World.* metaworld 3\.1\.1 requires mujoco 3\.3\.0"
    ):
        resolve(("mt80",))


def test_task_without_time_limit_requires_episode_length():
    with pytest.raises(
        ConfigError, match=r"lqr-lqr-2-1 has episodes without a limit.\nSet one: --task.episode-length 500"
    ):
        SimulatedTask("lqr-lqr-2-1", 2, None, False)
    assert SimulatedTask("lqr-lqr-2-1", 2, 30, False).length == 30


# ------------------------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_rewards_lie_between_zero_and_one(name):
    world = SimulatedTask(name, 1, None, False)
    assert world.length == 1000
    assert np.isfinite(world.begin(1)).all()
    rewards = [world.act(move).reward for move in actions(world, 40)]
    assert 0.0 <= min(rewards) <= max(rewards) <= 1.0


def moving(name, speed, **heights):
    """The reward of a variant whose body moves at a speed."""
    env = SimulatedTask(name, 1, None, False)._env
    env.reset()
    physics = env.physics
    for name in ("speed", "horizontal_velocity"):
        if hasattr(physics, name):
            setattr(physics, name, lambda: speed)
    for body, height in heights.items():
        physics.named.data.xpos[body, "z"] = height
    return env.task.get_reward(physics)


def test_cheetah_run_backwards_rewards_negative_speed():
    assert [moving("cheetah-run-backwards", -speed) for speed in (8.0, 4.0, 0.0, -4.0)] == [1.0, 0.5, 0.0, 0.0]


def test_cheetah_run_front_requires_raised_foot_before_speed():
    high = {"torso": 1.2, "bfoot": 1.2, "ffoot": 0.0}
    assert moving("cheetah-run-front", 6.0, **high) == pytest.approx(1.0)
    assert moving("cheetah-run-front", 0.0, **high) == pytest.approx(1 / 6)
    assert moving("cheetah-run-back", 6.0, **high) < 0.5


def test_cheetah_jump_rewards_height_and_low_speed():
    high = {"torso": 1.2, "bfoot": 1.2, "ffoot": 1.2}
    assert moving("cheetah-jump", 0.0, **high) == pytest.approx(1.0)
    assert moving("cheetah-jump", 9.0, **high) == pytest.approx(5 / 6)


def test_walker_walk_backwards_negates_velocity():
    from dm_control.suite import walker

    env = SimulatedTask("walker-walk-backwards", 1, None, False)._env
    env.reset()
    env.step(np.ones(6))
    forwards = walker.Physics.horizontal_velocity(env.physics)
    assert env.physics.horizontal_velocity() == -forwards != 0.0


def test_reacher_three_has_three_links():
    world = SimulatedTask("reacher-three-easy", 1, None, False)
    assert world.actions == 3
    assert len(world.begin(0)) == 3 + 2 + 3


# -------------------------------------------------------------------------------------------------------- several tasks


def test_multi_task_assigns_tasks_in_turn_and_observes_task_index():
    env = build("cartpole-balance", "walker-run", num_envs=4)
    obs = env.reset()
    assert obs["task"].tolist() == [0, 1, 0, 1]
    assert obs["obs"].shape == (4, 24)
    assert not obs["obs"][0, 5:].any()
    assert [(part.name, part.actions, part.length) for part in env.parts] == [
        ("cartpole-balance", 1, 500),
        ("walker-run", 6, 500),
    ]
    assert env.action_space.shape == (6,)


@pytest.mark.parametrize(
    ("names", "lanes", "envs"), [("mt30", 8, 120), ("mt30", 16, 240), ("cup-catch,walker-run,cup-spin", 8, 24)]
)
def test_several_tasks_set_number_of_environments(names, lanes, envs):
    recipe = parse_recipe(RecipeOptions(recipe="dmc-tdmpc2"), [f"task={names}", f"run.lanes={lanes}"], "")
    assert resolve_recipe(recipe, 1).task.num_envs == envs


@pytest.mark.parametrize(("words", "envs"), [(["task=walker-run"], 8), (["task=walker-run,cup-catch"], 8)])
def test_tasks_that_share_eight_environments_keep_them(words, envs):
    assert resolve_recipe(parse_recipe(RecipeOptions(recipe="dmc-tdmpc2"), words, ""), 1).task.num_envs == envs


def test_number_of_environments_that_tasks_cannot_share_is_rejected_with_number():
    recipe = parse_recipe(RecipeOptions(recipe="dmc-tdmpc2"), ["task=mt30", "task.num_envs=16"], "")
    with pytest.raises(ConfigError, match=r"Use --task\.num-envs 120"):
        resolve_recipe(recipe, 1)


def test_evaluate_plays_each_task_at_least_once():
    class Idle:
        def initial_state(self, count):
            return {}

        def act(self, obs, memory):
            return torch.zeros(len(obs["task"]), 2), memory

    names = ("cartpole-balance", "pendulum-swingup", "cup-catch")
    config = DMControlConfig(tasks=names, num_envs=6, episode_length=5)
    scores = evaluate(Idle(), config, Runtime.single_process(RunConfig(lanes=2)), 2)
    assert {f"return/{name}_mean" for name in names} <= scores.keys()


def test_multi_task_spaces_cover_tasks_of_other_processes():
    env = build("cartpole-balance", "walker-run", num_envs=2, lanes=Lanes(2, range(1), 0))
    assert env.reset()["task"].tolist() == [0]
    assert env.observation_space["obs"].shape == (24,)
    assert env.action_space.shape == (6,)


def test_evaluate_multi_task_reports_each_task():
    class Idle:
        def initial_state(self, count):
            return {}

        def act(self, obs, memory):
            return torch.zeros(len(obs["task"]), 1), memory

    config = DMControlConfig(tasks=("cartpole-balance", "pendulum-swingup"), num_envs=4, episode_length=20)
    scores = evaluate(Idle(), config, Runtime.single_process(RunConfig(lanes=2)), 4)
    balance, swingup = scores["return/cartpole-balance_mean"], scores["return/pendulum-swingup_mean"]
    assert balance > 20.0 > 1.0 > swingup
    assert scores["return_mean"] == pytest.approx((balance + swingup) / 2)


# ------------------------------------------------------------------------------------------------------------ rendering


def draw_or_skip(world):
    try:
        return world.render(48, 64)
    except ConfigError as error:
        pytest.skip(str(error))


def test_draw_returns_nonuniform_uint8_image():
    world = SimulatedTask("cartpole-balance", 2, None, False)
    world.begin(0)
    image = draw_or_skip(world)
    assert image.shape == (48, 64, 3)
    assert image.dtype == np.uint8
    assert image.std() > 5


def test_pixel_observations_are_restored():
    draw_or_skip(SimulatedTask("pendulum-swingup", 2, None, False))
    env, other = (build("pendulum-swingup", num_envs=1, pixels=True) for _ in range(2))
    env.reset()
    other.reset()
    for _ in range(4):
        step = env.step(torch.ones(1, 1))
    assert step.obs.shape == (1, 9, 64, 64)
    assert step.obs.dtype == torch.uint8
    assert not torch.equal(step.obs[0, :3], step.obs[0, 6:])
    other.load_lane_state(0, env.lane_state(0))
    assert torch.equal(env.step(torch.ones(1, 1)).obs, other.step(torch.ones(1, 1)).obs)


def test_rendering_disabled_keeps_physics_and_raises_on_render():
    code = (
        "import torch; from lockstep.lanes import Lanes; from lockstep.tasks.dm_control.env import DMControlConfig\n"
        "config, lanes = DMControlConfig(tasks=('pendulum-swingup',), num_envs=1), Lanes(1, range(1), 0)\n"
        "env = config.build(lanes, torch.device('cpu'))\n"
        "env.reset(); env.step(torch.zeros(1, 1)); print(env.render_title(0), env.render_text(0)); env.render(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"MUJOCO_GL": "disabled", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
    )
    assert done.stdout.startswith(b"pendulum-swingup [")
    assert b"cannot be rendered here (MUJOCO_GL=disabled)" in done.stderr
    assert b"libegl1" in done.stderr


def test_task_sets_contain_only_known_tasks():
    assert set(SETS["mt30"]) <= suite._known().keys()


@pytest.mark.slow
def test_torch_dynamo_can_be_imported_after_opengl():
    text = (
        "from lockstep.tasks.dm_control.suite import SimulatedTask\n"
        "SimulatedTask('pendulum-swingup', 1, 10, False).render(32, 32)\n"
        "import torch._dynamo; print('both are loaded')"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "both are loaded"), done.stderr
