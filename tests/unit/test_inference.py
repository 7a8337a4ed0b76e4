"""Loaded policies in plain Python: no launcher, no process group, recurrent state that can be reset per row."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import lockstep
from helpers.tiny_recipes import ITERATION, checkpoints_of, tiny
from lockstep.checkpoint import format as form
from lockstep.config import ConfigError, apply_overrides
from lockstep.distributed import Runtime
from lockstep.inference import LoadedPolicy
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
