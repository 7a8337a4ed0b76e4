"""Loaded policies in plain Python: no launcher, no process group, recurrent state that can be reset per row."""

import json
import shutil
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import lockstep
from helpers.tiny_recipes import ITERATION, checkpoints_of, tiny
from lockstep.algorithms.ppo import PPO
from lockstep.checkpoint import format as form
from lockstep.config import ConfigError, apply_overrides
from lockstep.distributed import Runtime
from lockstep.inference import LoadedPolicy, build_algorithm
from lockstep.protocols import Policy
from lockstep.registry import find_recipe
from lockstep.tasks.gym.spaces import env_actions
from lockstep.training_loop import train

SCORES = {1: 1.0, 2: 5.0, 3: 2.0, 4: 3.0}
"""Evaluation score of each iteration; the second is the best."""
PLAIN_PYTHON = """
import json, sys
import numpy as np
import lockstep
obs = np.frombuffer(bytes.fromhex(sys.argv[2]), np.uint8).reshape(-1, 3, 4, 4)
lockstep.load(sys.argv[1])
actions = lockstep.load(sys.argv[1]).act(obs)  # second call: the first import must not replace the function by a module
import torch.distributed as dist
print(json.dumps({"actions": actions.tolist(), "group": dist.is_initialized()}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four iterations with the evaluation scores SCORES."""
    with pytest.MonkeyPatch.context() as patch:
        scores = iter(SCORES.values())
        result = {"return_std": 0.0, "episodes": 1.0}
        patch.setattr(
            "lockstep.training_loop.evaluate_during_training", lambda *_: {"return_mean": next(scores)} | result
        )
        # With this learning rate the policies of all iterations differ; with this seed the best policy selects
        # different actions for different boards.
        recipe = tiny(tmp_path_factory.mktemp("runs"), eval_every=ITERATION, seed=3)
        return train(apply_overrides(recipe, {"algo.learning_rate": 0.05})).path


@pytest.fixture
def boards():
    """Random binary boards with three channels: body, apple and head."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 2, (64, 3, 4, 4)).astype(np.uint8)


def weights_at(run, samples):
    """Return the algorithm state of the checkpoint at this number of samples."""
    (name,) = (run / "checkpoints").glob(f"{samples:012d}-g0001")
    return form.strip_prefix(form.read_shared(name), "algorithm")


def weights_in(policy):
    return {f"net.{name}": tensor for name, tensor in policy.policy.net.state_dict().items()}


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_policy_in_fresh_process_returns_same_actions(run, boards):
    command = [sys.executable, "-c", PLAIN_PYTHON, str(run), boards.tobytes().hex()]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["group"] is False
    assert told["actions"] == lockstep.load(run).act(boards).tolist()
    assert len(set(told["actions"])) > 1  # a constant policy would make this check weak


def test_loaded_policy_matches_trained_network(run, boards):
    recipe = lockstep.load(run).recipe
    runtime = Runtime.single_process(recipe.run)
    agent = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)
    agent.load_shared_state(weights_at(run, 4 * ITERATION))
    outputs, _ = agent.net(torch.from_numpy(boards))
    assert lockstep.load(run, at=4 * ITERATION).act(boards).tolist() == outputs.argmax(-1).tolist()


def test_load_uses_best_checkpoint_by_default(run):
    assert checkpoints_of(run) == [n * ITERATION for n in SCORES]
    assert same(weights_in(lockstep.load(run)), weights_at(run, 2 * ITERATION))
    for iteration in SCORES:
        found = weights_in(lockstep.load(run, at=iteration * ITERATION))
        assert same(found, weights_at(run, iteration * ITERATION))
        assert same(found, weights_at(run, 2 * ITERATION)) == (iteration == 2)


def test_load_with_damaged_best_warns_and_uses_newest_valid(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (best,) = (copy / "checkpoints").glob(f"{2 * ITERATION:012d}-g0001")
    (best / form.SHARED).write_bytes(b"")
    with pytest.warns(UserWarning, match="The best checkpoint is damaged: .*shared.safetensors"):
        policy = lockstep.load(copy)
    assert same(weights_in(policy), weights_at(copy, max(SCORES) * ITERATION))


def test_load_without_evaluations_uses_newest_checkpoint(tmp_path):
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path
    assert same(weights_in(lockstep.load(path)), weights_at(path, 2 * ITERATION))


def test_act_accepts_arrays_tensors_and_lists(run, boards):
    policy = lockstep.load(str(run))
    wanted = policy.act(boards)
    assert isinstance(wanted, np.ndarray)
    assert wanted.shape == (64,)
    assert policy.act(torch.from_numpy(boards)).tolist() == wanted.tolist()
    assert policy.act(boards.tolist()).tolist() == wanted.tolist()
    assert policy.act(boards[:3]).tolist() == wanted[:3].tolist()


def test_load_does_not_modify_run_directory(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    lockstep.load(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "is not a run directory"),
        (lambda path: (path / "config.yaml").write_text("format: 3\nrecipe: snake-ppo\n"), "has no checkpoint yet"),
        (
            lambda path: (path / "config.yaml").write_text("format: 3\nrecipe: nonsense\n"),
            "there is no recipe 'nonsense'",
        ),
        (
            lambda path: (path / "config.yaml").write_text(f"format: 3\nrecipe: {path}/mine.py\n"),
            "the recipe of .* is a file inside it",  # code inside a run directory is never executed
        ),
    ],
)
def test_load_of_invalid_run_directory_is_rejected(tmp_path, make, words):
    path = tmp_path / "run"
    path.mkdir()
    (path / "mine.py").write_text("raise SystemExit('this must not run')")
    make(path)
    with pytest.raises(ConfigError, match=words):
        lockstep.load(path)


def test_load_of_missing_checkpoint_error_lists_available(run):
    with pytest.raises(ConfigError, match=r"no checkpoint at 77 samples(.|\n)*There are: 128, 256, 384, 512\."):
        lockstep.load(run, at=77)


# ----------------------------------------------------------------------------------- single observations, exploration

SMALL = {"task.num_envs": 8, "algo.rollout_steps": 8, "run.total_samples": 64, "run.eval_every": None}
SMALL |= {"run.record_video": False, "run.device": "cpu"}


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """A run on continuous actions from -2 to 2, whose policy almost always leaves these bounds."""
    settings = {"task.id": "Pendulum-v1", "algo.batch_size": 64, "run.name": "pendulum"} | SMALL
    recipe = apply_overrides(find_recipe("gym-ppo")(), settings)
    recipe = apply_overrides(recipe, {"run.runs_dir": str(tmp_path_factory.mktemp("runs"))})

    def widen(self):
        setup(self)
        torch.nn.init.constant_(self.net.log_std, 5.0)
        torch.nn.init.constant_(self.net.policy_head.bias, 50.0)

    setup = PPO.setup
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPO, "setup", widen)
        return train(recipe).path


def test_act_on_single_observation_returns_single_action(run, boards, pendulum):
    policy = lockstep.load(run)
    assert [int(policy.act(board)) for board in boards] == policy.act(boards).tolist()
    env = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=0)
    action = lockstep.load(pendulum).act(obs)
    assert env.action_space.contains(action)
    np.testing.assert_array_equal(lockstep.load(pendulum).act(obs[None]), action[None])


def test_act_distinguishes_dict_observation_from_batch():
    space = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Discrete(3)})
    policy = LoadedPolicy(Counter(), None, torch.device("cpu"), space)
    assert policy.act({"a": np.zeros(2), "b": 1}).shape == ()
    assert policy.act({"a": np.zeros((1, 2)), "b": [1]}).shape == (1,)
    with pytest.raises(ConfigError, match=r"shape {'a': \(2,\), 'b': \(1,\)} were given"):
        policy.act({"a": np.zeros(2), "b": [1]})


def test_act_on_wrong_shape_error_names_both_shapes(pendulum):
    with pytest.raises(ConfigError, match=r"shape \(4,\) were given, but one observation is Box\(.*\(3,\)"):
        lockstep.load(pendulum).act(np.zeros(4))


def test_act_clips_actions_to_bounds_as_training_does(pendulum):
    policy, obs = lockstep.load(pendulum), np.zeros((100, 3))
    raw, _ = policy.policy.act(torch.zeros(100, 3), {})
    assert (raw > 2).all()
    assert policy.act(obs).tolist() == env_actions(policy.action_space, raw.numpy()).tolist()
    sampled = policy.act(obs, deterministic=False)
    assert (sampled.min(), sampled.max()) == (-2, 2)


def test_sampled_actions_follow_distribution_and_seed(run, boards):
    policy, obs = lockstep.load(run, seed=5), np.repeat(boards[:1], 4000, axis=0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, second = (policy.act(obs, deterministic=False) for _ in range(2))
    outputs = policy.policy.forward(torch.from_numpy(boards[:1]), {})[1]
    shares = np.bincount(first, minlength=4) / len(first)
    np.testing.assert_allclose(shares, outputs.softmax(-1)[0].numpy(), atol=0.03)
    assert (first != second).any()
    assert lockstep.load(run, seed=5).act(obs, deterministic=False).tolist() == first.tolist()
    assert lockstep.load(run, seed=6).act(obs, deterministic=False).tolist() != first.tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mpc", [True, False])
def test_tdmpc2_policy_samples_around_its_action(mpc):
    pytest.importorskip("dm_control")
    recipe = find_recipe("dmc-tdmpc2")
    agent = build_algorithm(apply_overrides(recipe(), recipe.smoke_overrides | {"algo.mpc": mpc}))
    task = agent.task
    policy = LoadedPolicy(agent.policy(), None, torch.device("cpu"), task.observation_space, task.action_space)
    obs = np.zeros(task.observation_space.shape)
    actions = []
    for deterministic in (True, True, False, False):
        policy.reset()
        actions.append(policy.act(obs, deterministic))
    assert actions[0].tolist() == actions[1].tolist()
    assert len({tuple(action.tolist()) for action in actions}) == 3


def test_policy_without_exploration_error_names_sample():
    class Fixed(Policy):
        def forward(self, obs, memory):
            return obs, obs, memory

    policy = LoadedPolicy(Fixed(), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"Fixed has no exploration(.|\n)*sample\(\)"):
        policy.act(np.zeros((1, 2)), deterministic=False)


def test_ddpg_policy_samples_with_exploration_noise():
    agent = build_algorithm(apply_overrides(find_recipe("gym-ddpg")(), {"algo.exploration_noise": 0.1}))
    task = agent.task
    policy = LoadedPolicy(agent.policy(), None, torch.device("cpu"), task.observation_space, task.action_space)
    obs = np.zeros((2000, *task.observation_space.shape))
    noise = (policy.act(obs, deterministic=False) - policy.act(obs)) / task.action_space.high
    assert noise.std() == pytest.approx(0.1, rel=0.1)


# ---------------------------------------------------------------------------------------- without environment packages


def test_load_needs_no_environment(pendulum, monkeypatch):
    wanted = lockstep.load(pendulum).act(np.zeros(3))

    def fail(*_):
        raise ModuleNotFoundError("No module named 'mujoco'")

    monkeypatch.setattr("lockstep.tasks.gym.env.make", fail)
    assert lockstep.load(pendulum).act(np.zeros(3)) == wanted
    (pendulum / "task.json").rename(pendulum / "moved.json")
    try:
        with pytest.raises(ConfigError, match="needs a package"):
            lockstep.load(pendulum)
    finally:
        (pendulum / "moved.json").rename(pendulum / "task.json")


def test_load_of_run_without_task_file_builds_task(pendulum, tmp_path):
    copy = shutil.copytree(pendulum, tmp_path / "run")
    (copy / "task.json").unlink()
    assert lockstep.load(copy).act(np.zeros(3)) == lockstep.load(pendulum).act(np.zeros(3))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"observation_space": 5}', "box"])
def test_load_with_damaged_task_file_error_names_it(pendulum, tmp_path, text):
    copy = shutil.copytree(pendulum, tmp_path / "run")
    huge = '{"type": "Box", "shape": [99999, 99999], "dtype": "float32", "low": 0, "high": 1}'
    (copy / "task.json").write_text(text.replace("box", f'{{"observation_space": {huge}, "action_space": {huge}}}'))
    with pytest.raises(ConfigError, match=r"task.json(.|\n)*Remove"):
        lockstep.load(copy)


# ------------------------------------------------------------------------------------------------------ recurrent state


class Counter:
    """A recurrent policy whose action is computed from the number of steps of each row."""

    def initial_state(self, count):
        return {"seen": torch.zeros(count, 1), "inner": {"twice": torch.zeros(count, 2, 2)}}

    def act(self, obs, memory):
        memory = {"seen": memory["seen"] + 1, "inner": {"twice": memory["inner"]["twice"] + 2}}
        return memory["seen"][:, 0] + memory["inner"]["twice"][:, 0, 0], memory


def counting():
    return LoadedPolicy(Counter(), recipe=None, device=torch.device("cpu"))


OBS = {"a": np.zeros((3, 2)), "b": np.zeros(3)}


def test_act_keeps_recurrent_state_between_calls():
    policy = counting()
    assert [policy.act(OBS).tolist() for _ in range(2)] == [[3, 3, 3], [6, 6, 6]]


def test_act_with_changed_batch_size_names_both_sizes_and_reset():
    policy = counting()
    policy.act(OBS)
    with pytest.raises(ConfigError, match=r"3 rows and was given 2 observations(.|\n)*reset\(\)"):
        policy.act({"a": np.zeros((2, 2)), "b": np.zeros(2)})
    with pytest.raises(ConfigError, match=r"3 rows and was given 2 values of the mask"):
        policy.reset([True, False])
    policy.reset()
    assert policy.act({"a": np.zeros((2, 2)), "b": np.zeros(2)}).tolist() == [3, 3]


def test_reset_clears_all_rows_or_only_masked_rows():
    policy = counting()
    policy.act(OBS)
    policy.reset([True, False, True])
    assert policy.act(OBS).tolist() == [3, 6, 3]
    policy.reset(np.array([False, True, False]))
    assert policy.act(OBS).tolist() == [6, 3, 6]
    policy.reset(torch.zeros(3, dtype=torch.bool))
    assert policy.act(OBS).tolist() == [9, 6, 9]
    policy.reset()
    assert policy.act(OBS).tolist() == [3, 3, 3]


def test_reset_before_first_act_or_without_state_has_no_effect(run, boards):
    policy = counting()
    policy.reset([True, False, True])
    assert policy.act(OBS).tolist() == [3, 3, 3]
    plain = lockstep.load(run)
    wanted = plain.act(boards).tolist()
    plain.reset(np.ones(64, bool))
    assert plain.act(boards).tolist() == wanted
