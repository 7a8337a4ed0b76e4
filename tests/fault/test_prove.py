"""`lockstep prove` on the command line: one hash for a correct recipe, a message and exit code 1 for others."""

import json
import re
import sys
from pathlib import Path

import pytest

from helpers.multiprocess import command
from lockstep.cli import main

pytestmark = pytest.mark.distributed

PROVE = [sys.executable, "-m", "lockstep", "prove"]

UNSOUND = '''
"""Every process normalises the advantages of its own lanes: the commonest fault of all."""

from dataclasses import dataclass

from lockstep.algorithms.ppo import PPO, PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.tasks.gym.env import GymConfig


class LocalPPO(PPO):
    def _prepare_batch(self, metrics):
        batch = super()._prepare_batch(metrics)
        advantage = batch["advantage"]
        return batch | {"advantage": (advantage - advantage.mean()) / advantage.std()}


@dataclass(frozen=True, kw_only=True)
class LocalConfig(PPOConfig):
    def build(self, task, runtime):
        return LocalPPO(self, task, runtime)


@dataclass(frozen=True, kw_only=True)
class Unsound(Recipe):
    task: GymConfig = GymConfig(num_envs=8)
    algo: LocalConfig = LocalConfig(rollout_steps=16, batch_size=64, epochs=1)
    run: RunConfig = RunConfig(total_samples=384, eval_every=None)
'''


def test_prove_reports_a_recipe_whose_result_depends_on_process_count(tmp_path):
    (tmp_path / "unsound.py").write_text(UNSOUND)
    ended = command([*PROVE, "unsound.py", "--procs", "1", "2", "--json", "proof.json"], directory=tmp_path)
    assert ended.code == 1
    assert "Not one agent." in ended.output
    assert len(re.findall(r"│ [0-9a-f]{32} │", ended.output)) == 2
    assert re.search(r"procs-2 differs from procs-1 first at iteration 1: algorithm\.net\.", ended.output)
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"unsound.py", "proof.json"}
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert (proof["recipe"], proof["verdict"]) == ("unsound", "not one agent")
    assert [row["processes"] for row in proof["rows"]] == ["1", "2"]
    assert len({row["hash"] for row in proof["rows"]}) == 2


def test_prove_refuses_an_unwritable_json_path_before_training(tmp_path, capsys):
    assert main(["prove", "gym-ppo", "--json", str(tmp_path / "no" / "proof.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow  # `make prove` does the same in CI, with one process more
def test_prove_gym_ppo_with_kills_finds_one_hash_on_1_2_3_processes(tmp_path):
    ended = command([*PROVE, "gym-ppo", "--procs", "1", "2", "3", "--kill"], directory=tmp_path)
    assert ended.code == 0, ended.output
    assert "One agent. 5 runs, one hash" in ended.output
    (hash_of_all,) = set(re.findall(r"│ ([0-9a-f]{32}) ", ended.output))
    assert ended.output.count(hash_of_all) == 6  # five rows and the verdict
    assert re.search(r"3 → \d .*killed in mid-iteration", ended.output)
    assert re.search(r"2 → \d .*killed during a save", ended.output)


PONG = [
    *("--task.num-envs", "8", "algo.rollout_steps=8", "algo.batch_size=32", "algo.epochs=1"),
    *("run.total_samples=256", "run.eval_every=none", "run.save_every=64"),
]
"""Eight updates of the network for images; an iteration is 64 steps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "recipe", "words"),
    [
        ("ale_py", "gym-ppo", ["--task.id", "ALE/Pong-v5", *PONG]),
        ("envpool", "gym-ppo", ["--task.id", "{helpers}/envpool_tasks.py:PoolPong-v0", *PONG]),
        ("gymnasium", "gym-ppo", ["--task.id", "CartPole-v1", "--task.vectorization-mode", "vector_entry_point"]),
        ("gymnasium", "gym-ppo-lstm", ["--task.id", "{helpers}/gym_toys.py:LockstepVault-v0"]),
    ],
    ids=["atari", "envpool", "make_vec", "masked-recurrent"],
)
def test_prove_environments_with_kills_finds_one_hash(tmp_path, package, recipe, words):
    pytest.importorskip(package)
    helpers = Path(__file__).parents[1] / "helpers"
    words = [word.format(helpers=helpers) for word in words]
    ended = command([*PROVE, recipe, *words, "--procs", "1", "2", "4", "--kill"], directory=tmp_path)
    assert ended.code == 0, ended.output
    assert "One agent. 5 runs, one hash" in ended.output


@pytest.mark.slow  # a minute on each core
def test_prove_tdmpc2_offline_then_online_with_kills_finds_one_hash(tmp_path):
    pytest.importorskip("dm_control")
    tasks = "task=cup-catch,pendulum-swingup"
    train = [sys.executable, "-m", "lockstep", "train", "dmc-tdmpc2", "--smoke", tasks, "run.name=source"]
    assert command([*train, "run.eval_every=none"], directory=tmp_path).code == 0
    write = [sys.executable, "-m", "lockstep", "episodes", "runs/source", "--out", "data"]
    assert command(write, directory=tmp_path).code == 0
    offline = [tasks, "algo.offline.data=data", "algo.offline.samples=128"]  # the first half of the smoke setting
    ended = command([*PROVE, "dmc-tdmpc2", "--procs", "1", "2", "--kill", *offline], directory=tmp_path)
    assert ended.code == 0, ended.output
    assert "One agent. 4 runs, one hash" in ended.output
