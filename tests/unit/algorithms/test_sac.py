"""SAC: losses against hand-computed values, the temperature, exploration, non-finite values and settings."""

import math

import pytest
import torch

from helpers.agents import Agent, NonFiniteReward, parameters, same
from lockstep.algorithms.sac import SACConfig
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed.nonfinite import NonFiniteError
from lockstep.nn.squashed_gaussian import squashed_sample
from lockstep.tasks.gym.env import GymConfig

RUN = RunConfig(lanes=8, reduction="exact")


def sample_batch(agent):
    return agent.algorithm._sample_batch(agent.algorithm.updates)


@pytest.fixture(scope="module")
def trained():
    agent = Agent("gym-sac")
    agent.iterate(2)
    return agent


# --------------------------------------------------------------------------------------------------------------- losses


def constant(value):
    """Return a network whose value does not depend on its inputs."""
    return lambda obs, action: torch.full((len(action), 1), value)


def constant_actor(mean, log_std):
    return lambda obs: torch.tensor([[mean, log_std]]).expand(len(obs), 2)


def hand_made(monkeypatch, agent, temperature=0.5):
    """Replace the networks by constants: mean 0, standard deviation 1; critics 3 and 5, targets 2 and 4."""
    algorithm = agent.algorithm
    for name, value in {
        "actor": constant_actor(0.0, 0.0),
        "critics": [constant(3.0), constant(5.0)],
        "target_critics": [constant(2.0), constant(4.0)],
        "temperature": lambda: torch.tensor([temperature]),
    }.items():
        monkeypatch.setattr(algorithm, name, value)
    return algorithm


def test_critic_loss_matches_hand_computed_value(monkeypatch):
    algorithm = hand_made(monkeypatch, Agent("gym-sac"))
    batch = {name: torch.zeros(2, 3) for name in ("obs", "next_obs")} | {"action": torch.zeros(2, 1)}
    batch |= {
        "reward": torch.tensor([1.0, -1.0]),
        "discount": torch.tensor([0.9, 0.0]),
        "next_noise": torch.zeros(2, 1),
    }
    # The next action has log probability -log(2 pi) / 2, so its soft value is 2 + 0.5 * 0.918939.
    entropy = 0.5 * math.log(2 * math.pi)
    targets = [1.0 + 0.9 * (2.0 + 0.5 * entropy), -1.0]  # the second transition has ended
    expected = sum((value - target) ** 2 for value in (3.0, 5.0) for target in targets)
    loss = algorithm.critic_loss(batch)
    assert loss.loss_sum.item() == pytest.approx(expected, rel=1e-6)
    assert loss.num_samples == 2
    assert loss.metric_sums["target"].item() == pytest.approx(sum(targets))


def test_actor_loss_matches_hand_computed_value(monkeypatch):
    agent = Agent("gym-sac", temperature=0.5)
    learned = agent.algorithm.temperature.is_learned
    algorithm = hand_made(monkeypatch, agent)
    algorithm.temperature.is_learned = learned
    loss = algorithm.actor_loss({"obs": torch.zeros(4, 3), "noise": torch.zeros(4, 1)})
    log_prob = -0.5 * math.log(2 * math.pi)
    assert loss.loss_sum.item() == pytest.approx(4 * (0.5 * log_prob - 3.0), rel=1e-6)  # the lower critic
    assert loss.metric_sums["entropy"].item() == pytest.approx(-4 * log_prob)
    assert not learned


@pytest.mark.parametrize(("target_entropy", "rises"), [(-100.0, False), (100.0, True)])
def test_temperature_rises_if_the_entropy_is_below_the_target(target_entropy, rises):
    agent = Agent("gym-sac", target_entropy=target_entropy, initial_temperature=0.5)
    agent.iterate(2)
    assert (agent.algorithm.temperature().item() > 0.5) == rises


def test_temperature_gradient_is_temperature_times_excess_entropy(trained):
    algorithm, batch = trained.algorithm, sample_batch(trained)
    loss = algorithm.actor_loss(batch)
    (gradient,) = torch.autograd.grad(loss.loss_sum, [algorithm.temperature.log_value])
    _, log_prob = squashed_sample(algorithm.actor(batch["obs"]), batch["noise"])
    expected = algorithm.temperature() * (-log_prob - algorithm.target_entropy).sum()
    assert algorithm.target_entropy == -1.0  # minus the number of action features
    torch.testing.assert_close(gradient, expected)


def test_actor_gradient_does_not_depend_on_the_temperature_loss(trained):
    algorithm, batch = trained.algorithm, sample_batch(trained)
    action, log_prob = squashed_sample(algorithm.actor(batch["obs"]), batch["noise"])
    value = torch.minimum(*(critic(batch["obs"], action)[:, 0] for critic in algorithm.critics))
    objective = (algorithm.temperature().detach() * log_prob - value).sum()
    weights = list(algorithm.actor.parameters())
    expected = torch.autograd.grad(objective, weights)
    found = torch.autograd.grad(algorithm.actor_loss(batch).loss_sum, weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_actor_step_leaves_critics_unchanged():
    agent = Agent("gym-sac")
    agent.iterate(2)
    algorithm = agent.algorithm
    critics, actor = parameters(algorithm.critics), parameters(algorithm.actor)
    algorithm.actor_optimizer.step(algorithm.actor_loss, sample_batch(agent))
    assert same(parameters(algorithm.critics), critics)
    assert not same(parameters(algorithm.actor), actor)


# ------------------------------------------------------------------------------------------------------------- training


def test_fixed_temperature_is_not_trained_or_in_the_optimizer():
    agent = Agent("gym-sac", temperature=0.2)
    metrics = agent.iterate(2)
    assert agent.algorithm.updates > 0
    assert agent.algorithm.temperature().item() == pytest.approx(0.2)
    assert not any("temperature" in name for name in agent.algorithm.actor_optimizer.shared_state())
    assert metrics.global_sums["temperature"][0].item() == pytest.approx(0.2)


def test_learning_rates_are_scaled_with_the_batch():
    agent = Agent(
        "gym-sac", lr_scaling="linear", reference_batch_size=16, temperature_lr=1e-2, actor_lr=1e-3, critic_lr=1e-4
    )
    agent.iterate(2)
    algorithm = agent.algorithm
    groups = [*algorithm.actor_optimizer._inner.param_groups, *algorithm.critic_optimizer._inner.param_groups]
    assert [group["lr"] for group in groups] == pytest.approx([2e-3, 2e-2, 2e-4])


def test_micro_batches_give_the_same_update():
    whole, parts = Agent("gym-sac"), Agent("gym-sac", grad_accum_steps=2)
    for agent in (whole, parts):
        agent.iterate(2)
    assert whole.algorithm.updates == whole.algorithm.config.updates_until(whole.clock.samples) > 0
    for one, other in zip(parameters(whole.algorithm.actor), parameters(parts.algorithm.actor), strict=True):
        torch.testing.assert_close(one, other)


def test_actions_are_uniform_before_learning_and_sampled_after():
    agent = Agent("gym-sac", learning_starts=128, rollout_steps=16, initial_temperature=1e-3)
    agent.algorithm.actor.head.bias.data[:] = torch.tensor([1.0, -20.0])  # tanh(1), without noise
    agent.algorithm.actor.head.weight.data.zero_()
    agent.algorithm.collect(agent.clock)
    random = agent.algorithm.rollout["action"].clone()
    assert random.min() < -0.8
    assert random.max() > 0.9
    agent.algorithm.update(agent.clock)
    agent.algorithm.actor.head.bias.data[:] = torch.tensor([1.0, -20.0])
    agent.algorithm.actor.head.weight.data.zero_()
    agent.algorithm.collect(agent.clock)
    assert agent.algorithm.rollout["action"].flatten().tolist() == pytest.approx([math.tanh(1.0)] * 128, abs=1e-4)


def test_policy_acts_within_bounds_and_samples_with_noise(trained):
    policy, obs = trained.algorithm.policy(), trained.task.observations()
    mean, _ = policy.act(obs, {})
    one, other = (policy.sample(obs, {}, seed=1, counter=count)[0] for count in (0, 1))
    assert mean.shape == one.shape == (8, 1)
    assert max(x.abs().max() for x in (mean, one, other)) <= 2
    assert not torch.equal(one, other)
    assert torch.equal(one, policy.sample(obs, {}, seed=1, counter=0)[0])
    assert torch.equal(mean, policy.act(obs, {})[0])


# ---------------------------------------------------------------------------------------------------- non-finite values


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_nonfinite_rewards_never_reach_replay(nonfinite):
    agent = Agent("gym-sac", run={"run.on_nonfinite": nonfinite})
    agent.algorithm.task = NonFiniteReward(agent.task, at=12)  # in the second iteration of eight steps
    agent.iterate()
    updates, count = agent.algorithm.updates, agent.algorithm.replay.count
    if nonfinite == "stop":
        with pytest.raises(NonFiniteError, match=r"lane 3, environment 0 of the lane, step 3 of the rollout"):
            agent.iterate()
        return
    agent.iterate()
    assert (agent.algorithm.updates, agent.algorithm.replay.count) == (updates, count)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 100}, "batch_size is 100, which 8 lanes cannot share evenly"),
        ({"learning_starts": 4}, "learning_starts is 4"),
        ({"rollout_steps": 0}, "rollout_steps is 0"),
        ({"updates_per_sample": 0.0}, "updates_per_sample is 0.0"),
        ({"tau": 2.0}, "tau 2.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"initial_temperature": -1.0}, "initial_temperature -1.0"),
    ],
)
def test_invalid_settings_are_rejected(wrong, words):
    with pytest.raises(ConfigError, match=words):
        SACConfig(**wrong).validate(GymConfig(id="Pendulum-v1", num_envs=8), RUN)


def test_discrete_actions_are_rejected():
    with pytest.raises(ConfigError, match=r"Discrete\(2\) are not supported by SAC"):
        Agent("gym-sac", run={"task.id": "CartPole-v1"})
