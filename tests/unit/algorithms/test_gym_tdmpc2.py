"""TD-MPC2 on Gymnasium environments: observations, actions, discounts and termination."""

import pytest
import torch

from lockstep.clock import TrainState
from lockstep.config import ConfigError, apply_overrides
from lockstep.distributed import Runtime
from lockstep.recipes.gym_tdmpc2 import GymTDMPC2

CLIFF = "helpers.gym_toys:LockstepCliff-v0"


class Agent:
    """The recipe with smoke settings on a toy environment."""

    def __init__(self, id=CLIFF, run=None, **settings):
        recipe = apply_overrides(GymTDMPC2(), GymTDMPC2.smoke_overrides)
        settings = {"task.id": id, "task.env_kwargs": {}, "run.lanes": 8, "run.device": "cpu"} | settings
        recipe = apply_overrides(recipe, settings)
        self.runtime = Runtime.single_process(recipe.run)
        self.task = recipe.task.build(self.runtime.lanes, self.runtime.device)
        self.algorithm = recipe.algo.build(self.task, self.runtime)
        self.task.reset()
        self.clock = TrainState(total_samples=10_000)

    def iterate(self, count):
        for _ in range(count):
            self.algorithm.collect(self.clock)
            self.algorithm.update(self.clock)
            self.clock.advance(self.algorithm.samples)
        return self


@pytest.mark.parametrize("form", ["vector", "dict", "image"])
def test_observations_of_vectors_dicts_and_images_are_learned_from(form):
    agent = Agent(**{"task.env_kwargs": {"form": form}}).iterate(3)
    assert agent.algorithm.updates == 6
    policy = agent.algorithm.policy()
    action, _ = policy.act(agent.task.observations(), policy.initial_state(8))
    assert action.shape == (8, 1)
    assert action.min() >= -2.0
    assert action.max() <= 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task.env_kwargs": {"form": "matrix"}}, "FlattenObservation"),
        ({"id": "helpers.gym_toys:LockstepEndlessCliff-v0"}, "Set the discount: --algo.gamma 0.99"),
        ({"id": "CartPole-v1"}, "actions of Discrete.* are not supported by TD-MPC2"),
    ],
)
def test_unsupported_task_is_refused_with_a_fix(settings, words):
    with pytest.raises(ConfigError, match=words):
        Agent(**settings)


def test_discount_comes_from_the_step_limit():
    assert Agent().algorithm.discounts.tolist() == pytest.approx([0.95])  # 20 steps: the smallest
    assert Agent(id="Pendulum-v1").algorithm.discounts.tolist() == pytest.approx([0.975])  # 200 steps
    endless = Agent(id="helpers.gym_toys:LockstepEndlessCliff-v0", **{"algo.gamma": 0.9})
    assert endless.algorithm.discounts.tolist() == pytest.approx([0.9])


@pytest.mark.slow
def test_termination_is_learned_and_ends_planned_rewards():
    settings = {"algo.updates_per_sample": 0.5, "algo.seed_samples": 512, "algo.buffer_size": 2048, "algo.mpc": False}
    agent = Agent(**settings, **{"algo.learning_rate": 3e-3}).iterate(24)
    algorithm = agent.algorithm
    stored = algorithm.replay.buffers["terminated"][:, : algorithm.replay._stop]
    assert stored.any()
    with torch.no_grad():
        edge = torch.tensor([[-3.0, 1.0], [-1.0, 1.0], [0.5, 1.0], [1.2, 1.0], [1.6, 1.0]])
        logits = algorithm.model.termination_logit(algorithm.model.encode(edge, None), None)
    assert logits[-1] > 0.0 > logits[0], logits
    # A step into the cliff has no value after it.
    z = algorithm.model.encode(edge[-1:], None).unsqueeze(1).detach()
    actions, noise = torch.ones(1, 2, 3, 1), torch.zeros(1, 2, 1)
    pair = torch.tensor([0, 1])
    values = algorithm.planner.value(z, actions, None, noise, pair)
    for layer in (algorithm.model.critics[-1],):
        torch.nn.init.constant_(layer.bias, 0.0)
        torch.nn.init.normal_(layer.weight, std=5.0)
    torch.testing.assert_close(algorithm.planner.value(z, actions, None, noise, pair), values)
