"""PPO with one policy for two agents learns a cooperative game with a known optimum."""

import pytest

from helpers.logs import last_values
from lockstep.config import apply_overrides
from lockstep.io.jsonl import METRICS
from lockstep.registry import find_recipe
from lockstep.training_loop import train

SAMPLES = 20_480
SETTINGS = {
    "task": {"id": "helpers.zoo_toys:Signals", "num_envs": 64},
    "algo": {"rollout_steps": 8, "batch_size": 256, "epochs": 8, "learning_rate": 3e-3, "entropy_coef": 0.02},
    "run": {"total_samples": SAMPLES, "eval_every": SAMPLES, "eval_episodes": 128, "record_video": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("centralized", [False, True])
def test_agents_learn_to_signal_and_reach_the_optimum(centralized, tmp_path):
    more = {"task.centralized_critic": centralized, "algo": {"normalize_obs": False, "normalize_rewards": False}}
    place = {"run": {"runs_dir": str(tmp_path), "name": "run", "device": "cpu"}}
    recipe = find_recipe("zoo-ppo")()
    for settings in (SETTINGS, more, place):
        recipe = apply_overrides(recipe, settings)
    train(recipe)
    results = last_values(tmp_path / "run" / METRICS)
    # Without signals the best return is 0.5. Two seeds got 1.0 with either critic.
    assert results["eval/return_mean"] > 0.95
    assert results["eval/team_return_mean"] == pytest.approx(2 * results["eval/return_mean"])
