"""Agents that come and go: two processes train the same agent as one."""

import pytest

from helpers.multiprocess import together
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find
from lockstep.config import apply_overrides
from lockstep.registry import find_recipe
from lockstep.training_loop import train

SETTINGS = {
    "task": {"id": "helpers.zoo_toys:ComingAndGoing", "num_envs": 24, "centralized_critic": True},
    "algo": {"rollout_steps": 8, "batch_size": 192, "epochs": 1, "bptt_steps": 4, "recurrent.kind": "lstm"},
    "algo.recurrent.hidden_size": 8,
    "algo.encoder.hidden_sizes": [8],
    "run": {"total_samples": 576, "eval_every": 576, "eval_episodes": 24, "reduction": "exact", "device": "cpu"},
    "run.record_video": False,
    "run.lanes": 8,
}


def trained(path):
    """Train in the given directory, as one of several processes; return the fraction of active samples."""
    place = {"run": {"runs_dir": str(path.parent), "name": path.name}}
    recipe = apply_overrides(apply_overrides(find_recipe("zoo-ppo")(), SETTINGS), place)
    return train(recipe).clock.metrics["train/active_fraction"]


def hash_of(path):
    return form.hash_checkpoint(path / "checkpoints" / str(find(path / "checkpoints")[0]))


@pytest.mark.distributed
def test_agents_that_come_and_go_train_equally_on_two_processes(tmp_path):
    fraction = trained(tmp_path / "one")
    assert together(trained, 2, tmp_path / "two") == [fraction, fraction]
    assert hash_of(tmp_path / "two") == hash_of(tmp_path / "one")
    assert 0.3 < fraction < 0.9
