"""TD-MPC2: update schedule in global samples, losses against reference formulas, optimizers, targets and scale."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.agents import parameters, same
from helpers.toy_envs import ToyWorldsConfig
from lockstep.algorithms.tdmpc2.agent import TDMPC2Config
from lockstep.algorithms.tdmpc2.losses import LossConfig, model_loss, policy_loss, policy_sample_and_value
from lockstep.algorithms.tdmpc2.mppi import PlanConfig
from lockstep.algorithms.tdmpc2.world_model import WorldModelConfig
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed import Runtime
from lockstep.distributed.nonfinite import NonFiniteError
from lockstep.ops.two_hot import two_hot, two_hot_inverse

LANES = 4
TINY = {
    "batch_size": 16,
    "seed_samples": 24,
    "buffer_size": 400,
    "updates_per_sample": 0.125,
    "plan": PlanConfig(num_samples=8, num_policy_samples=2, num_elites=3, iterations=2),
    "model": WorldModelConfig(size=1, encoder=16, width=16, latent=16, num_q=3, bins=11),
}


class Agent:
    """The algorithm on a toy world."""

    def __init__(self, task=None, run=None, hosting=None, **algo):
        self.config = TDMPC2Config(**TINY | algo)
        self.runtime = Runtime.single_process(RunConfig(**{"lanes": LANES} | (run or {})), hosting=hosting)
        self.task = ToyWorldsConfig(**{"num_envs": 8} | (task or {})).build(self.runtime.lanes, self.runtime.device)
        self.algorithm = self.config.build(self.task, self.runtime)
        self.clock = TrainState(total_samples=1000)

    def iterate(self, count=1):
        for _ in range(count):
            self.algorithm.collect(self.clock)
            metrics = self.algorithm.update(self.clock)
            self.clock.advance(self.algorithm.samples)
        return metrics


# ------------------------------------------------------------------------------------------------------ update schedule


def test_first_update_makes_up_for_seed_samples():
    config = TDMPC2Config(seed_samples=2500)
    assert [config.updates_until(n) for n in (0, 2499, 2500, 2508, 5000)] == [0, 0, 2500, 2508, 5000]
    agent = Agent(updates_per_sample=0.5, task={"ends": 0.0})  # 8 samples per iteration, learning starts at 24
    seen = []
    for _ in range(5):
        agent.iterate()
        seen.append(agent.algorithm.updates)
    assert seen == [0, 0, 12, 16, 20]


def test_actions_are_random_until_learning_starts_then_planned(monkeypatch):
    agent = Agent()
    planned = []
    plan = agent.algorithm.planner.plan
    monkeypatch.setattr(agent.algorithm.planner, "plan", lambda *a, **k: (planned.append(1), plan(*a, **k))[1])
    agent.iterate(3)
    assert not planned
    assert agent.algorithm.rollout["action"].abs().max() <= 1.0
    agent.iterate()
    assert planned
    assert agent.algorithm.plans.any()


def test_plan_is_cleared_at_episode_end():
    agent = Agent(task={"ends": 1.0}, horizon=1)
    agent.iterate(5)
    assert not agent.algorithm.plans.any()


def test_policy_acts_when_planning_is_disabled():
    agent = Agent(mpc=False)
    agent.algorithm.planner.plan = None
    agent.iterate(4)
    action, _ = agent.algorithm.policy().act(agent.task.observations(), agent.algorithm.policy().initial_state(8))
    assert action.shape == (8, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 18}, "batch_size is 18, which 4 lanes cannot share evenly"),
        ({"seed_samples": 23}, "Set --algo.seed-samples to at least 24"),
        ({"horizon": 0}, "horizon is 0"),
        ({"plan": PlanConfig(num_samples=4)}, "num_samples is 4, num_policy_samples 24"),
    ],
)
def test_invalid_settings_are_rejected(settings, words):
    config = TDMPC2Config(**TINY | settings)
    with pytest.raises(ConfigError, match=words):
        config.validate(ToyWorldsConfig(num_envs=8), RunConfig(lanes=LANES, reduction="exact"))


def test_num_envs_not_divisible_by_tasks_is_rejected():
    with pytest.raises(ConfigError, match="num_envs is 8, which 3 tasks cannot share evenly"):
        TDMPC2Config(**TINY).validate(ToyWorldsConfig(num_envs=8, num_tasks=3), RunConfig(lanes=LANES))


def test_discounts_come_from_task_unless_gamma_is_set():
    assert Agent(task={"length": 500, "num_tasks": 2}).algorithm.discounts.tolist() == pytest.approx([0.99, 0.99])
    assert Agent(task={"length": 500}, gamma=0.9).algorithm.discounts.tolist() == pytest.approx([0.9])


def test_images_are_shifted_in_learning_by_lane_and_counter():
    whole, part = Agent(task={"pixels": True}), Agent(task={"pixels": True}, hosting=range(1, 2))
    plain = Agent(task={"pixels": True}, random_shift=0)
    for agent in (whole, part, plain):
        while agent.algorithm.replay.count < 24:  # without updates, which need every lane
            agent.algorithm.collect(agent.clock)
            rollout, outcomes = agent.algorithm.rollout, agent.algorithm.outcomes
            agent.algorithm.replay.write({name: x[0] for name, x in (rollout.buffers | outcomes.buffers).items()})
    shifted, lane, original = (agent.algorithm._sample_batch(7)["obs"] for agent in (whole, part, plain))
    assert shifted.shape == original.shape == (16, 4, 3, 44, 44)
    assert not torch.equal(shifted, original)
    assert torch.equal(shifted[4:8], lane)  # of the second of four lanes, whatever lanes share its process
    assert torch.equal(shifted, whole.algorithm._sample_batch(7)["obs"])
    assert (shifted != original).flatten(2).any(2).float().mean() > 0.9  # each step of a sequence has its own shift


def test_images_are_learned_from_and_not_shifted_in_acting():
    agent = Agent(task={"pixels": True})
    agent.iterate(5)
    assert agent.algorithm.updates > 0
    policy, obs = agent.algorithm.policy(), agent.task.observations()
    first, _ = policy.act(obs, policy.initial_state(8))
    assert torch.equal(first, policy.act(obs, policy.initial_state(8))[0])


# --------------------------------------------------------------------------------------------------------------- losses


def drawn(**options):
    """Return an agent with non-zero output layers, and a batch."""
    agent = Agent(**options)
    agent.iterate(10)
    model = agent.algorithm.model
    for last in (model.reward[-1], model.critics[-1], agent.algorithm.targets[-1]):
        torch.nn.init.normal_(last.weight, std=0.5, generator=torch.Generator().manual_seed(3))
    return agent, agent.algorithm._sample_batch(agent.algorithm.updates)


@pytest.mark.parametrize("episodic", [False, True])
def test_model_loss_matches_reference_formula(episodic):
    agent, batch = drawn(episodic=episodic)
    algorithm, model = agent.algorithm, agent.algorithm.model
    loss, latents = model_loss(model, algorithm.targets, algorithm.discounts, algorithm.pairs[0], LossConfig(), batch)
    total = 0.0
    for n in range(16):
        assert batch["whole"][n]
        obs, action, reward, over = (batch[name][n] for name in ("obs", "action", "reward", "terminated"))
        z = model.encode(obs[0], None)
        for t in range(3):
            assert torch.allclose(latents[n, t], z, atol=1e-6)
            following = model.encode(obs[t + 1], None).detach()
            chosen = model.act(following, batch["target"][n, t], None).action
            joint = model.joint(following, chosen, None)
            worth = two_hot_inverse(algorithm.targets(joint[None])[algorithm.pairs[0], 0], 10.0).min()
            target = reward[t] + algorithm.discounts[0] * (1.0 - over[t].float()) * worth
            joint = model.joint(z, action[t], None)
            kept = (batch["kept"][n, :, t] / 0.99)[:, None]
            judged = model.critics(joint[None], kept=kept)[:, 0]
            value = -(two_hot(target.detach(), 11, 10.0) * judged.log_softmax(-1)).sum(-1).mean()
            paid = -(two_hot(reward[t], 11, 10.0) * model.reward(joint).log_softmax(-1)).sum()
            z = model.dynamics(joint)
            apart = F.mse_loss(z, following)
            total += 0.5**t / 3 * (20 * apart + 0.1 * paid + 0.1 * value)
            if episodic:
                total += F.binary_cross_entropy_with_logits(model.termination_logit(z, None), over[t].float()) / 3
    assert loss.num_samples == 16
    torch.testing.assert_close(loss.loss_sum, total, rtol=1e-4, atol=1e-4)


def test_incomplete_slices_have_zero_weight():
    agent, batch = drawn()
    algorithm = agent.algorithm
    batch["whole"][::2] = 0.0
    half = {name: x[1::2] for name, x in batch.items()}
    arguments = (algorithm.model, algorithm.targets, algorithm.discounts, algorithm.pairs[0], LossConfig())
    some, own = (model_loss(*arguments, part)[0] for part in (batch, half))
    torch.testing.assert_close(some.loss_sum, own.loss_sum)
    assert some.num_samples == own.num_samples == 8
    seen = [part | {"z": z} for part, z in ((batch, algorithm.latents), (half, algorithm.latents[1::2]))]
    some, own = (policy_loss(algorithm.model, algorithm.scale, algorithm.pairs[1], LossConfig(), x) for x in seen)
    torch.testing.assert_close(some.loss_sum, own.loss_sum)
    assert some.num_samples == own.num_samples == 8


def test_policy_loss_matches_reference_formula():
    agent, batch = drawn()
    algorithm, model = agent.algorithm, agent.algorithm.model
    batch["z"], scale = algorithm.latents, torch.tensor([2.5])
    loss = policy_loss(model, scale, algorithm.pairs[1], LossConfig(entropy_coef=0.3), batch)
    total = 0.0
    for n in range(16):
        for t in range(4):
            z = batch["z"][n, t]
            acted = model.act(z, batch["policy"][n, t], None)
            kept = (batch["policy_kept"][n, :, t] / 0.99)[:, None]
            pair = model.critics(model.joint(z, acted.action, None)[None], algorithm.pairs[1], kept)[:, 0]
            total -= 0.5**t / 4 * (0.3 * acted.entropy + two_hot_inverse(pair, 10.0).mean() / 2.5)
    torch.testing.assert_close(loss.loss_sum, total, rtol=1e-4, atol=1e-4)


def test_latents_are_those_before_the_step_with_grad_accumulation():
    whole, parts = Agent(), Agent(grad_accum_steps=2)
    for agent in (whole, parts):
        agent.iterate(3)
    batch = whole.algorithm._sample_batch(whole.algorithm.updates)
    before = model_loss(
        copy.deepcopy(whole.algorithm.model),
        whole.algorithm.targets,
        whole.algorithm.discounts,
        whole.algorithm.pairs[0],
        LossConfig(),
        batch,
    )[1]
    for agent in (whole, parts):
        agent.algorithm.pairs = whole.algorithm.pairs
        agent.algorithm.model_optimizer.step(agent.algorithm.model_loss, batch)
        torch.testing.assert_close(agent.algorithm.latents, before)  # computed before the step
    for one, two in zip(whole.algorithm.model.parameters(), parts.algorithm.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------- optimizers


def test_model_and_policy_steps_update_only_their_parameters():
    agent, batch = drawn()
    algorithm = agent.algorithm
    policy = parameters(algorithm.model.policy)
    rest = [net for name, net in algorithm.model.named_children() if name != "policy"]
    algorithm.model_optimizer.step(algorithm.model_loss, batch)
    assert same(parameters(algorithm.model.policy), policy)
    others = [parameters(net) for net in rest]
    algorithm.policy_optimizer.step(algorithm.policy_loss, batch | {"z": algorithm.latents})
    assert not same(parameters(algorithm.model.policy), policy)
    assert all(same(parameters(net), before) for net, before in zip(rest, others, strict=True))


def test_encoder_learning_rate_is_lower_and_policy_has_own_epsilon():
    algorithm = Agent(learning_rate=1e-3).algorithm
    rates = [group["lr"] for group in algorithm.model_optimizer._inner.param_groups]
    assert rates == pytest.approx([1e-3, 3e-4])
    assert algorithm.policy_optimizer._inner.param_groups[0]["eps"] == 1e-5


def test_targets_follow_critics_and_scale_follows_value_range():
    agent, batch = drawn(tau=0.25)
    algorithm = agent.algorithm
    before, scale = parameters(algorithm.targets), algorithm.scale.clone()
    algorithm._update_targets()
    for old, target, live in zip(
        before, algorithm.targets.parameters(), algorithm.model.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(target, old + 0.25 * (live.detach() - old))
    seen = batch | {"z": algorithm.latents}
    _, values = policy_sample_and_value(algorithm.model, algorithm.pairs[1], seen)
    values = values[:, 0].detach()  # of the first step only
    low, high = torch.quantile(values, torch.tensor([0.05, 0.95]))
    algorithm._rescale(seen)
    torch.testing.assert_close(algorithm.scale, scale + 0.25 * ((high - low).clamp(min=1.0) - scale))


def test_task_embedding_norms_stay_at_most_one():
    agent = Agent(task={"num_tasks": 2}, learning_rate=0.5)
    agent.iterate(6)
    assert agent.algorithm.model.task.weight.norm(dim=1).max() <= 1.0 + 1e-5


# ---------------------------------------------------------------------------------------------------------------- other


def test_nonfinite_rollout_is_not_stored():
    agent = Agent(run={"on_nonfinite": "skip"})
    agent.iterate()
    agent.task._at[3, 0] = torch.nan
    agent.iterate()
    assert agent.algorithm.replay.count == 8
    strict = Agent()
    strict.task._at[3, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="observation"):
        strict.iterate()


def test_multitask_training_uses_one_model():
    agent = Agent(task={"num_tasks": 2}, episodic=True)
    metrics = agent.iterate(5)
    assert {"model/loss", "policy/loss", "model/termination", "scale"} <= metrics.global_sums.keys()
    assert not agent.algorithm.replay.buffers["action"][:, :5, 0, 1:].any()  # task 0 has one action feature


def test_benchmark_ops_do_not_change_model():
    agent = Agent()
    agent.iterate(4)
    before = parameters(agent.algorithm.model)
    works = agent.algorithm.benchmark_ops()
    for work in works:
        work.run()
    assert [work.kind for work in works] == ["env", "inference", "learning"]
    assert same(parameters(agent.algorithm.model), before)
