"""MPPI planning: elites, batched plans, tasks, termination and noise."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lockstep.algorithms.tdmpc2 import mppi
from lockstep.algorithms.tdmpc2.mppi import (
    PlanConfig,
    Planner,
    PlanningPolicy,
    choose_elites,
    sample_critic_pairs,
    shift_mean,
)
from lockstep.algorithms.tdmpc2.world_model import WorldModel, WorldModelConfig
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.pytree import tree_map
from lockstep.rng import RandomStream, seeded_init

SMALL = PlanConfig(num_samples=24, num_policy_samples=4, num_elites=6, iterations=3)
STEPS = 3


def planner(actions=(2,), config=SMALL, episodic=False, discount=0.9):
    sizes = WorldModelConfig(size=1, encoder=16, width=24, latent=16, num_q=3, bins=21)
    with seeded_init(RandomStream(0, "model")):
        model = WorldModel(sizes, Box(-np.inf, np.inf, (4,), np.float32), actions, episodic)
    for last in (model.reward[-1], model.critics[-1]):
        torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(1))
    return Planner(model, config, STEPS, torch.full((len(actions),), discount))


def inputs(plan, count):
    lanes = Lanes(count, range(count), 0)
    obs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    noise = plan.draw_noise(lanes.streams("normal"), lanes.streams("gumbel"), 0, 1)
    return obs, noise, plan.draw_pairs(RandomStream(0, "pairs"), 0)


# --------------------------------------------------------------------------------------------------------------- elites


def test_choose_elites_selects_best_and_weights_by_value():
    # Two elites with values 3 and 3 - 2 log 3 and a temperature of 1/2: weights 3/4 and 1/4.
    values = torch.tensor([[0.0, 3.0, 3.0 - 2 * math.log(3), -9.0]])
    actions = torch.tensor([[9.0, 1.0, 0.2, 9.0]]).view(1, 4, 1, 1)
    elites, weights, mean, std = choose_elites(values, actions, 2, temperature=0.5)
    assert elites.flatten().tolist() == pytest.approx([1.0, 0.2])
    assert weights.flatten().tolist() == pytest.approx([0.75, 0.25])
    assert mean.item() == pytest.approx(0.8)
    assert std.item() == pytest.approx(math.sqrt(0.75 * 0.2**2 + 0.25 * 0.6**2))


def test_choose_elites_is_independent_per_environment():
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    actions = torch.randn(3, 8, 2, 2, generator=torch.Generator().manual_seed(1))
    whole = choose_elites(values, actions, 4, 0.5)
    for env in range(3):
        alone = choose_elites(values[env : env + 1], actions[env : env + 1], 4, 0.5)
        assert all(torch.allclose(part[env], own[0]) for part, own in zip(whole, alone, strict=True))


def test_sequence_value_is_rewards_plus_terminal_q_value():
    plan = planner()
    model, pair = plan.model, torch.tensor([2, 0])
    z = model.encode(torch.ones(1, 4), None)
    actions = torch.linspace(-1, 1, STEPS * 2).view(1, 1, STEPS, 2)
    noise = torch.tensor([[[0.3, -0.4]]])
    total, weight, latent = 0.0, 1.0, z
    for step in range(STEPS):
        joint = model.joint(latent, actions[:, 0, step], None)
        bins = torch.linspace(-10, 10, 21)
        mean = (model.reward(joint).softmax(-1) * bins).sum()
        total += weight * (mean.sign() * mean.abs().expm1()).item()
        latent, weight = model.dynamics(joint), weight * 0.9
    action = model.act(latent, noise[0], None).action
    ends = [model.q_value(model.critics, latent, action, None, torch.tensor([n, n]))[0].item() for n in (2, 0)]
    value = plan.value(z.unsqueeze(1), actions, None, noise, pair)
    assert value.item() == pytest.approx(total + weight * sum(ends) / 2, rel=1e-4)


def test_sequence_value_ignores_rewards_after_termination():
    plan = planner(episodic=True)
    z, actions, noise = torch.zeros(1, 1, 16), torch.zeros(1, 5, STEPS, 2), torch.zeros(1, 5, 2)
    plan.model.termination[-1].bias.data.fill_(50.0)  # terminated after the first step
    with_end = plan.value(z, actions, None, noise, torch.tensor([0, 1]))
    joint = plan.model.joint(torch.zeros(1, 16), torch.zeros(1, 2), None)
    bins = torch.linspace(-10, 10, 21)
    first = (plan.model.reward(joint).softmax(-1) * bins).sum()
    torch.testing.assert_close(with_end, (first.sign() * first.abs().expm1()).expand(1, 5))


# ---------------------------------------------------------------------------------------------------------------- plans


@torch.no_grad()
@pytest.mark.parametrize("actions", [(2,), (1, 3)])
def test_batched_plan_equals_plan_of_each_environment(actions):
    plan = planner(actions)
    obs, noise, pairs = inputs(plan, 6)
    task = torch.tensor([0, 1] * 3) if len(actions) > 1 else None
    warm = torch.zeros(6, STEPS, max(actions))
    whole = plan.plan(obs, task, warm, noise, pairs, explore=True)
    for env in range(6):
        own = slice(env, env + 1)
        mine = tree_map(lambda x, own=own: x[own], noise)
        alone = plan.plan(obs[own], None if task is None else task[own], warm[own], mine, pairs, explore=True)
        for part, single in zip(whole, alone, strict=True):
            torch.testing.assert_close(part[own], single, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_plan_is_independent_of_cache_size(monkeypatch):
    plan = planner((1, 3))
    obs, noise, pairs = inputs(plan, 5)
    given = obs, torch.tensor([0, 1, 0, 1, 0]), torch.zeros(5, STEPS, 3), noise, pairs
    whole = plan.plan(*given, explore=True)
    for fit in (1, 2 * SMALL.num_samples):
        monkeypatch.setattr(mppi, "MAX_CPU_SEQUENCES", fit)
        for part, single in zip(whole, plan.plan(*given, explore=True), strict=True):
            torch.testing.assert_close(part, single, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_plan_keeps_unused_action_features_at_zero():
    plan = planner((1, 3))
    obs, noise, pairs = inputs(plan, 2)
    action, mean = plan.plan(obs, torch.tensor([0, 1]), torch.zeros(2, STEPS, 3), noise, pairs, explore=True)
    assert not action[0, 1:].any()
    assert not mean[0, :, 1:].any()
    assert mean[1].all()


@torch.no_grad()
def test_plan_maximizes_value():
    """The value function here rewards only the first action feature."""
    plan = planner((2,), PlanConfig(num_samples=64, num_policy_samples=4, num_elites=8, iterations=6))
    plan.value = lambda z, actions, *_: actions[..., 0].sum(-1)
    obs, noise, pairs = inputs(plan, 3)
    action, mean = plan.plan(obs, None, torch.zeros(3, STEPS, 2), noise, pairs, explore=False)
    assert (mean[..., 0] > 0.9).all()
    assert (action[:, 0] > 0.9).all()


def test_shift_mean_drops_first_step_and_appends_zeros():
    mean = torch.arange(6.0).view(1, 3, 2)
    assert shift_mean(mean).tolist() == [[[2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]]


@torch.no_grad()
def test_planning_policy_is_deterministic_and_continues_its_plan():
    plan = planner()
    policy = PlanningPolicy(plan, torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]))
    obs, memory = torch.ones(3, 4), policy.initial_state(3)
    action, after = policy.act(obs, memory)
    assert torch.equal(action, policy.act(obs, memory)[0])
    assert torch.equal(action[0], action[2])  # the same noise for all environments
    assert ((action >= -1.0) & (action <= 3.0)).all()
    assert not torch.equal(after["plan"], policy.act(obs, after)[1]["plan"])


def test_rounds_of_many_action_features_are_two_more():
    assert [planner((actions,), PlanConfig()).iterations for actions in (19, 20)] == [6, 8]


def test_lane_noise_is_independent_of_host_process():
    whole, some = Lanes(4, range(4), 0), Lanes(4, range(2, 3), 0)
    drawn = [planner().draw_noise(lanes.streams("a"), lanes.streams("b"), 5, 2)["sequences"] for lanes in (whole, some)]
    assert torch.equal(drawn[0][4:6], drawn[1])


def test_sample_critic_pairs_returns_two_different_critics():
    pairs = sample_critic_pairs(RandomStream(0, "pairs"), 3, 40, 5)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert pairs.unique().tolist() == [0, 1, 2, 3, 4]


def test_more_elites_than_samples_is_rejected():
    with pytest.raises(ConfigError, match="num_samples is 8, num_policy_samples 24 and num_elites 64"):
        PlanConfig(num_samples=8).validate()
