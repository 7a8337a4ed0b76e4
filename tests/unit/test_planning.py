"""Planning: elites worked by hand, plans of many environments as of one, tasks, ends, and what is left to chance."""

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
    draw,
    sample_critic_pairs,
    shift_mean,
)
from lockstep.algorithms.tdmpc2.world_model import WorldModel, WorldModelConfig
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.nn.initialization import seeded_init
from lockstep.pytree import tree_map
from lockstep.rng import RandomStream

SMALL = PlanConfig(num_samples=24, num_policy_samples=4, num_elites=6, iterations=3)
STEPS = 3


def planner(actions=(2,), config=SMALL, episodic=False, discount=0.9):
    sizes = WorldModelConfig(size=1, encoder=16, width=24, latent=16, num_q=3, bins=21)
    with seeded_init(RandomStream(0, "model")):
        model = WorldModel(sizes, Box(-np.inf, np.inf, (4,), np.float32), actions, episodic)
    for last in (model.reward[-1], model.critics[-1]):
        torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(1))
    return Planner(model, config, STEPS, torch.full((len(actions),), discount))


def inputs(count, actions, config=SMALL, seed=0):
    lanes = Lanes(count, range(count), seed)
    obs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    noise = draw(lanes.streams("normal"), lanes.streams("gumbel"), 0, 1, config, STEPS, actions)
    return obs, noise, sample_critic_pairs(RandomStream(0, "pairs"), 0, config.rounds_for(actions), 3)


# --------------------------------------------------------------------------------------------------------------- elites


def test_elites_are_the_best_and_count_by_their_value():
    # Two elites of values 3 and 3 - 2 log 3, at a temperature of 1/2: weights 3/4 and 1/4.
    values = torch.tensor([[0.0, 3.0, 3.0 - 2 * math.log(3), -9.0]])
    actions = torch.tensor([[9.0, 1.0, 0.2, 9.0]]).view(1, 4, 1, 1)
    elites = choose_elites(values, actions, 2, temperature=0.5)
    assert elites.actions.flatten().tolist() == pytest.approx([1.0, 0.2])
    assert elites.weights.flatten().tolist() == pytest.approx([0.75, 0.25])
    assert elites.mean.item() == pytest.approx(0.8)
    assert elites.std.item() == pytest.approx(math.sqrt(0.75 * 0.2**2 + 0.25 * 0.6**2))


def test_elites_of_one_environment_know_nothing_of_another():
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    actions = torch.randn(3, 8, 2, 2, generator=torch.Generator().manual_seed(1))
    whole = choose_elites(values, actions, 4, 0.5)
    for env in range(3):
        alone = choose_elites(values[env : env + 1], actions[env : env + 1], 4, 0.5)
        assert all(torch.allclose(part[env], own[0]) for part, own in zip(whole, alone, strict=True))


def test_the_value_of_a_sequence_is_its_rewards_and_what_critics_say_of_its_end():
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


def test_nothing_counts_after_an_end_that_is_foreseen():
    plan = planner(episodic=True)
    z, actions, noise = torch.zeros(1, 1, 16), torch.zeros(1, 5, STEPS, 2), torch.zeros(1, 5, 2)
    plan.model.termination[-1].bias.data.fill_(50.0)  # over after the first step
    with_end = plan.value(z, actions, None, noise, torch.tensor([0, 1]))
    joint = plan.model.joint(torch.zeros(1, 16), torch.zeros(1, 2), None)
    bins = torch.linspace(-10, 10, 21)
    first = (plan.model.reward(joint).softmax(-1) * bins).sum()
    torch.testing.assert_close(with_end, (first.sign() * first.abs().expm1()).expand(1, 5))


# ---------------------------------------------------------------------------------------------------------------- plans


@torch.no_grad()
@pytest.mark.parametrize("actions", [(2,), (1, 3)])
def test_plans_of_many_environments_are_those_of_each_alone(actions):
    plan = planner(actions)
    obs, noise, pairs = inputs(6, max(actions))
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
def test_plans_are_the_same_however_many_sequences_fit_into_the_cache(monkeypatch):
    plan = planner((1, 3))
    obs, noise, pairs = inputs(5, 3)
    given = obs, torch.tensor([0, 1, 0, 1, 0]), torch.zeros(5, STEPS, 3), noise, pairs
    whole = plan.plan(*given, explore=True)
    for fit in (1, 2 * SMALL.num_samples):
        monkeypatch.setattr(mppi, "CACHED", fit)
        for part, single in zip(whole, plan.plan(*given, explore=True), strict=True):
            torch.testing.assert_close(part, single, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_task_plans_with_the_features_that_it_has():
    plan = planner((1, 3))
    obs, noise, pairs = inputs(2, 3)
    action, mean = plan.plan(obs, torch.tensor([0, 1]), torch.zeros(2, STEPS, 3), noise, pairs, explore=True)
    assert not action[0, 1:].any()
    assert not mean[0, :, 1:].any()
    assert mean[1].all()


@torch.no_grad()
def test_a_plan_finds_what_the_model_pays_for():
    """A model that pays for the first action feature alone."""
    plan = planner((2,), PlanConfig(num_samples=64, num_policy_samples=4, num_elites=8, iterations=6))
    plan.value = lambda z, actions, *_: actions[..., 0].sum(-1)
    obs, noise, pairs = inputs(3, 2, plan.config)
    action, mean = plan.plan(obs, None, torch.zeros(3, STEPS, 2), noise, pairs, explore=False)
    assert (mean[..., 0] > 0.9).all()
    assert (action[:, 0] > 0.9).all()


def test_a_plan_leaves_its_later_steps_to_the_next():
    mean = torch.arange(6.0).view(1, 3, 2)
    assert shift_mean(mean).tolist() == [[[2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]]


@torch.no_grad()
def test_a_policy_leaves_nothing_to_chance_and_goes_on_from_its_plan():
    plan = planner()
    policy = PlanningPolicy(plan, torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]))
    obs, memory = torch.ones(3, 4), policy.initial_state(3)
    action, after = policy.act(obs, memory)
    assert torch.equal(action, policy.act(obs, memory)[0])
    assert torch.equal(action[0], action[2])  # the same noise for each
    assert ((action >= -1.0) & (action <= 3.0)).all()
    assert not torch.equal(after["plan"], policy.act(obs, after)[1]["plan"])


def test_two_rounds_are_added_for_many_action_features():
    assert [PlanConfig().rounds_for(actions) for actions in (19, 20)] == [6, 8]


def test_noise_of_a_lane_does_not_depend_on_who_hosts_it():
    whole, some = Lanes(4, range(4), 0), Lanes(4, range(2, 3), 0)
    drawn = [
        draw(lanes.streams("a"), lanes.streams("b"), 5, 2, SMALL, STEPS, 2)["sequences"] for lanes in (whole, some)
    ]
    assert torch.equal(drawn[0][4:6], drawn[1])


def test_pairs_are_two_different_critics():
    pairs = sample_critic_pairs(RandomStream(0, "pairs"), 3, 40, 5)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert pairs.unique().tolist() == [0, 1, 2, 3, 4]


def test_more_elites_than_samples_are_refused_in_words():
    with pytest.raises(ConfigError, match="of 8 samples 24 are from the policy and 64 elites"):
        PlanConfig(num_samples=8).validate()
