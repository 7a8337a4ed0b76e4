"""Images that are too large for an encoder are rejected before a network is built."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from lockstep.config import ConfigError, apply_overrides
from lockstep.nn.encoders import CNN
from lockstep.registry import find_recipe
from lockstep.training_loop import train


class Camera(gymnasium.Env):
    """Random images; every episode has two steps."""

    observation_space, action_space = Box(0, 255, (96, 96, 3), np.uint8), Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.integers(0, 255, (96, 96, 3), np.uint8), {}

    def step(self, action):
        self.steps += 1
        return self.np_random.integers(0, 255, (96, 96, 3), np.uint8), 1.0, self.steps == 2, False, {}


gymnasium.register("LockstepCamera-v0", Camera)


@pytest.mark.parametrize("name", ["gym-ppo", "gym-ddpg", "gym-sac"])
def test_run_on_large_image_is_rejected_before_network_is_built(tmp_path, monkeypatch, name):
    recipe = find_recipe(name)
    task = {"task.id": "LockstepCamera-v0", "run.runs_dir": str(tmp_path), "run.device": "cpu"}
    task |= {"algo.encoder.kind": "cnn"}
    monkeypatch.setattr(CNN, "__init__", lambda *_: pytest.fail("the network was built"))
    with pytest.raises(ConfigError, match=r"\(96, 96, 3\) are too large(.|\n)*--algo.encoder.kind nature"):
        train(apply_overrides(recipe(), recipe.smoke_overrides | task | {"algo.encoder.hidden_sizes": (64,)}))


@pytest.mark.parametrize("kind", ["auto", "impala"])
def test_strided_encoder_trains_on_large_image(tmp_path, kind):
    settings = {"task.id": "LockstepCamera-v0", "run.runs_dir": str(tmp_path), "run.device": "cpu"}
    settings |= {"task.num_envs": 8, "algo.rollout_steps": 2, "algo.batch_size": 16, "algo.epochs": 1}
    settings |= {"run.total_samples": 16, "run.eval_every": None, "algo.encoder.kind": kind}
    assert train(apply_overrides(find_recipe("gym-ppo")(), settings)).clock.samples == 16
