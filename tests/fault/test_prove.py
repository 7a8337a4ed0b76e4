"""`lockstep prove` as a user runs it: one hash for a sound recipe, and words and an exit code for one that is not."""

import json
import re
import sys

import pytest

from lockstep.cli import main
from processes import command

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


def test_a_recipe_of_ones_own_that_trains_another_agent_on_two_processes_is_found_out(tmp_path):
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


def test_a_record_that_could_not_be_left_is_told_of_before_anything_is_trained(tmp_path, capsys):
    assert main(["prove", "gym-ppo", "--json", str(tmp_path / "no" / "proof.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow  # `make prove` does the same in CI, on one process more
def test_gym_ppo_is_one_agent_on_one_two_and_three_processes_killed_or_not(tmp_path):
    ended = command([*PROVE, "gym-ppo", "--procs", "1", "2", "3", "--kill"], directory=tmp_path)
    assert ended.code == 0, ended.output
    assert "One agent. 5 runs, one hash" in ended.output
    (hash_of_all,) = set(re.findall(r"│ ([0-9a-f]{32}) ", ended.output))
    assert ended.output.count(hash_of_all) == 6  # five rows and the verdict
    assert re.search(r"3 → \d .*killed in mid-iteration", ended.output)
    assert re.search(r"2 → \d .*killed during a save", ended.output)
