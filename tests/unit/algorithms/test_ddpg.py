"""DDPG: update schedule in global samples, target networks, losses, stored actions and settings."""

import pytest
import torch
from torch import nn

from helpers.agents import Agent, NonFiniteReward, parameters, same
from lockstep.algorithms.ddpg.agent import DDPGConfig
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed.nonfinite import NonFiniteError
from lockstep.protocols import AppendOnlyTensor
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.features import FEATURES, ON_BOARD

OWN = slice(FEATURES - 9, FEATURES - 5)  # position of a snake's own heading among its features
RUN = RunConfig(lanes=8, reduction="exact")


# ------------------------------------------------------------------------------------------------------ update schedule


def test_updates_until_depends_only_on_global_samples():
    config = DDPGConfig(learning_starts=100, updates_per_sample=0.3)
    assert [config.updates_until(samples) for samples in (0, 99, 100, 103, 104, 110, 1100)] == [0, 0, 0, 0, 1, 3, 300]
    for step in (1, 7, 64):
        taken = [config.updates_until(n + step) - config.updates_until(n) for n in range(0, 64 * 7 * 10, step)]
        assert sum(taken) == config.updates_until(64 * 7 * 10)


def test_epsilon_decays_with_progress_and_is_one_before_learning():
    config = DDPGConfig(epsilon=0.5, epsilon_end=0.1, epsilon_decay_fraction=0.5)
    assert [config.epsilon_at(p) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.5, 0.3, 0.1, 0.1])
    agent = Agent("team-ddpg", learning_starts=200, epsilon=0.5, epsilon_end=0.5)
    seen = []
    for _ in range(4):
        agent.iterate()
        seen.append((float(agent.algorithm.epsilon), agent.algorithm.updates > 0))
    # 128 samples per iteration: updates start after the second iteration, so epsilon drops in the third.
    assert seen == [(1.0, False), (1.0, True), (0.5, True), (0.5, True)]


def test_exponential_epsilon_falls_by_an_equal_factor():
    config = DDPGConfig(epsilon=0.8, epsilon_end=0.1, epsilon_schedule="exponential", epsilon_decay_fraction=0.75)
    values = [config.epsilon_at(progress) for progress in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert values == pytest.approx([0.8, 0.4, 0.2, 0.1, 0.1])


def test_learning_rates_are_scaled_with_the_batch():
    agent = Agent("gym-ddpg", lr_scaling="linear", reference_batch_size=16, batch_size=32)
    agent.iterate(8)
    rates = [
        part._inner.param_groups[0]["lr"]
        for part in (agent.algorithm.actor_optimizer, agent.algorithm.critic_optimizer)
    ]
    assert rates == pytest.approx([2 * agent.recipe.algo.actor_lr, 2 * agent.recipe.algo.critic_lr])


def test_micro_batches_give_the_same_update():
    whole, parts = Agent("gym-ddpg"), Agent("gym-ddpg", grad_accum_steps=2)
    for agent in (whole, parts):
        agent.iterate(4)
    assert whole.algorithm.updates > 0
    for one, other in zip(parameters(whole.algorithm.actor), parameters(parts.algorithm.actor), strict=True):
        torch.testing.assert_close(one, other)


def test_actor_updates_once_per_policy_delay_critic_updates():
    agent = Agent("team-ddpg", policy_delay=3, updates_per_sample=0.0625)
    agent.iterate(3)
    algorithm = agent.algorithm
    assert algorithm.updates == algorithm.config.updates_until(agent.clock.samples) == 20
    assert int(algorithm.actor_optimizer.updates) == 20 // 3


# ------------------------------------------------------------------------------------------------------------- learning


def test_actor_step_leaves_critic_parameters_and_gradients_unchanged():
    agent = Agent("team-ddpg")
    agent.iterate(2)
    algorithm = agent.algorithm
    critics, actor = parameters(algorithm.critics), parameters(algorithm.actor)
    left = [x.grad.clone() if x.grad is not None else None for x in algorithm.critics.parameters()]
    algorithm.actor_optimizer.step(algorithm.actor_loss, algorithm._sample_batch(algorithm.updates))
    assert same(parameters(algorithm.critics), critics)
    assert not same(parameters(algorithm.actor), actor)
    for before, x in zip(left, algorithm.critics.parameters(), strict=True):
        assert (x.grad is None and before is None) or torch.equal(x.grad, before)


def test_expected_actor_loss_is_the_mean_of_sampled_losses():
    settings = {"twin_critics": False, "logit_penalty": 0.0}
    expected = Agent("team-ddpg", actor_gradient="expected", **settings).algorithm
    sampled = Agent("team-ddpg", actor_gradient="sampled", **settings)
    sampled.iterate(3)
    for name in ("actor", "critics"):  # both have the weights of one agent
        getattr(expected, name).load_state_dict(getattr(sampled.algorithm, name).state_dict())
    with torch.no_grad():
        expected.actor.head.weight.mul_(100)  # probabilities that differ
        sampled.algorithm.actor.head.weight.mul_(100)
        batch = sampled.algorithm._sample_batch(0)
        noise = torch.distributions.Gumbel(0, 1).expand(batch["choosing"].shape)
        torch.manual_seed(0)
        totals = [
            float(sampled.algorithm.actor_loss(batch | {"choosing": noise.sample()}).loss_sum) for _ in range(2000)
        ]
        deviation = torch.tensor(totals).std() / 2000**0.5
        assert float(expected.actor_loss(batch).loss_sum) == pytest.approx(sum(totals) / 2000, abs=5 * float(deviation))


def test_expected_actor_gradient_prefers_the_best_legal_action():
    agent = Agent("team-ddpg", actor_gradient="expected", logit_penalty=0.0)
    agent.iterate(3)
    algorithm = agent.algorithm
    batch = algorithm._sample_batch(0)
    agent_obs, legal = algorithm.team.agent_inputs(batch["obs"])
    outputs = torch.zeros(len(legal), 4, requires_grad=True)
    algorithm._expected_value(agent_obs, outputs, legal).sum().backward()
    with torch.no_grad():
        columns = [torch.eye(4)[[action]].expand(len(legal), 4) for action in range(4)]
        values = sum(torch.cat([critic(agent_obs, x) for x in columns], 1) for critic in algorithm.critics) / 2
        allowed = legal.bool()
        mean = (values * allowed).sum(1, keepdim=True) / allowed.sum(1, keepdim=True)
        gradient = torch.where(allowed, (values - mean) / allowed.sum(1, keepdim=True), 0.0)
    torch.testing.assert_close(outputs.grad, gradient)
    assert all(parameter.grad is None for parameter in algorithm.target_critics.parameters())


def test_expected_actor_gradient_is_refused_where_it_is_not_defined():
    with pytest.raises(ConfigError, match="centralized critic"):
        DDPGConfig(actor_gradient="expected", centralized_critic=True).validate(TeamSnakesConfig(), RUN)
    config, task = DDPGConfig(actor_gradient="expected"), Agent("gym-ddpg").task
    with pytest.raises(ConfigError, match="not discrete"):
        config.check_task(task)


def test_schedule_lowers_both_learning_rates():
    agent = Agent("gym-ddpg", schedule="linear")
    agent.iterate(8)
    progress = (agent.clock.samples - agent.algorithm.samples) / agent.clock.total_samples
    for part, rate in (("actor_optimizer", "actor_lr"), ("critic_optimizer", "critic_lr")):
        now = getattr(agent.algorithm, part)._inner.param_groups[0]["lr"]
        assert now == pytest.approx((1 - progress) * getattr(agent.recipe.algo, rate))


def test_targets_start_as_copies_and_follow_by_tau():
    agent = Agent("team-ddpg", tau=0.25, policy_delay=1, updates_per_sample=1 / 64)
    algorithm = agent.algorithm
    assert same(parameters(algorithm.target_actor), parameters(algorithm.actor))
    before = parameters(algorithm.target_critics)
    agent.iterate()
    assert algorithm.updates == 1
    for old, target, live in zip(
        before, algorithm.target_critics.parameters(), algorithm.critics.parameters(), strict=True
    ):
        assert torch.allclose(target, old + 0.25 * (live.detach() - old), atol=1e-7)
        assert not target.requires_grad
    assert not any("target" in name for name in algorithm.critic_optimizer.shared_state())


CENTRAL = {"centralized_critic": True, "actor_gradient": "sampled"}


@pytest.mark.parametrize("settings", [{}, {"twin_critics": False}, CENTRAL, {"target_noise": 0.5}])
def test_critic_loss_matches_reference_formula(settings):
    agent = Agent("team-ddpg", **settings)
    agent.iterate(2)
    algorithm, batch = agent.algorithm, agent.algorithm._sample_batch(agent.algorithm.updates)
    rows = len(batch["discount"])
    following = batch["next_obs"]
    scores = algorithm.target_actor(following["seen"].flatten(0, 1)).view(rows, 3, 4)
    scores = scores + settings.get("target_noise", 0.0) * batch["smoothing"]
    scores = scores.masked_fill(following["legal"] == 0, -torch.inf)
    one_hot = nn.functional.one_hot(scores.argmax(-1), 4).float()

    def judge(critics, obs, vectors):
        if settings.get("centralized_critic"):
            return [critic(obs, vectors.flatten(1)) for critic in critics]
        return [critic(obs.flatten(0, 1), vectors.flatten(0, 1)).view(rows, 3) for critic in critics]

    lowest = torch.stack(judge(algorithm.target_critics, following["seen"], one_hot)).amin(0)
    target = batch["reward"] + batch["discount"].view(-1, 1) * lowest
    done = nn.functional.one_hot(batch["action"], 4).float()
    expected = sum((values - target).square().sum() for values in judge(algorithm.critics, batch["obs"]["seen"], done))
    loss = algorithm.critic_loss(batch)
    assert loss.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.num_samples == rows * 3  # a sample of three agents counts as three transitions
    assert len(algorithm.critics) == (2 if settings.get("twin_critics", True) else 1)


def test_replay_stores_executed_actions():
    agent = Agent("team-ddpg")
    agent.iterate(3)
    lane = agent.algorithm.lane_state(2)
    stored = {name: x.all() if isinstance(x, AppendOnlyTensor) else x for name, x in lane.items()}
    legal, action = stored["replay.obs.legal"], stored["replay.action"]  # [rows, E, 3, 4], [rows, E, 3]
    assert legal.gather(-1, action.unsqueeze(-1)).all()  # never a reversal, which the environment would replace
    before, after = (stored[f"replay.{moment}.seen"][..., OWN].argmax(-1) for moment in ("obs", "next_obs"))  # headings
    lived = stored["replay.reward"] > -0.4  # the recipe subtracts 0.5 for a death
    turned = torch.from_numpy(ON_BOARD)[before, action]
    assert (after == turned)[lived].all()
    assert not lived.all()


def test_policy_selects_legal_actions():
    agent = Agent("team-ddpg")
    agent.iterate(2)
    obs = agent.task.observations()
    action, _ = agent.algorithm.policy().act(obs, {})
    assert action.shape == (16, 6)  # our team, and the other team with scripted actions
    obs, action = {name: x[:, :3] for name, x in obs.items()}, action[:, :3]
    assert obs["legal"].gather(-1, action.unsqueeze(-1)).all()


def test_continuous_actions_stay_within_space_bounds():
    agent = Agent("gym-ddpg")
    agent.iterate(2)
    action, _ = agent.algorithm.policy().act(agent.task.observations(), {})
    assert action.shape == (8, 1)
    assert action.abs().max() <= 2
    assert agent.algorithm.replay.buffers["action"][:, :2].abs().max() <= 1


# ---------------------------------------------------------------------------------------------------- non-finite values


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_nonfinite_rewards_never_reach_replay(nonfinite):
    agent = Agent("gym-ddpg", run={"run.on_nonfinite": nonfinite})
    agent.algorithm.task = NonFiniteReward(agent.task, at=12)  # in the second iteration of eight steps
    agent.iterate()
    updates, count = agent.algorithm.updates, agent.algorithm.replay.count
    if nonfinite == "stop":
        with pytest.raises(
            NonFiniteError, match=r"lane 3, environment 0 of the lane, step 3 of the rollout: reward is nan"
        ):
            agent.iterate()
        return
    agent.iterate()
    assert (agent.algorithm.updates, agent.algorithm.replay.count) == (updates, count)
    agent.iterate()
    assert agent.algorithm.replay.count == count + 64
    assert agent.algorithm.updates > updates


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 100}, "batch_size is 100, which 8 lanes cannot share evenly"),
        ({"learning_starts": 4}, "learning_starts is 4"),
        ({"learning_starts": 10**6}, "learning_starts is 1000000"),
        ({"rollout_steps": 0}, "rollout_steps is 0"),
        ({"n_step": 0}, "n_step 0"),
        ({"policy_delay": 0}, "policy_delay is 0"),
        ({"updates_per_sample": 0.0}, "updates_per_sample is 0.0"),
        ({"tau": 0.0}, "tau 0.0"),
    ],
)
def test_invalid_settings_are_rejected(wrong, words):
    with pytest.raises(ConfigError, match=words):
        DDPGConfig(**wrong).validate(GymConfig(id="Pendulum-v1", num_envs=8), RUN)


def test_num_envs_not_divisible_by_lanes_is_rejected():
    with pytest.raises(ConfigError, match="num_envs is 12"):
        DDPGConfig().validate(TeamSnakesConfig(num_envs=12), RUN)
