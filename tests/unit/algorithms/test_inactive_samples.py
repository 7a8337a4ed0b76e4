"""PPO does not learn from rows whose agent is absent, and does not count them."""

import pytest
import torch
from torch.distributions import Categorical

from lockstep.algorithms.ppo import PPOConfig
from lockstep.checkpoint import format as form
from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.metrics import Metrics
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.recurrent import RecurrentConfig
from lockstep.tasks.pettingzoo.env import PettingZooConfig

TASK = PettingZooConfig(id="helpers.zoo_toys:ComingAndGoing", num_envs=24)
RUN = RunConfig(reduction="exact", device="cpu")
ALGO = PPOConfig(rollout_steps=12, batch_size=96, epochs=2, encoder=EncoderConfig(hidden_sizes=(8,)))


def build(**settings):
    """Return PPO on a game whose agents come and go."""
    runtime = Runtime.single_process(RUN, hosting=None)
    algorithm = type(ALGO)(**vars(ALGO) | settings)
    return algorithm.build(TASK.build(runtime.lanes, runtime.device), runtime)


def gradient(ppo, loss_sum):
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss_sum, list(ppo.net.parameters()))])


def loss_without_inactive_rows(ppo):
    """Compute the PPO loss of the last rollout, its samples and their number by hand, from active rows alone."""
    collector, config = ppo.collector, ppo.config
    rollout, outcomes = collector.rollout, collector.outcomes
    values = torch.cat([rollout["value"], collector.last_value.unsqueeze(0)]).tolist()
    cut, chosen, advantages = collector.truncation_values, [], []
    steps, rows = outcomes["active"].shape
    for row in range(rows):
        trace = 0.0
        for t in reversed(range(steps)):
            if not outcomes["active"][t, row]:
                trace = 0.0
                continue
            terminated, truncated = bool(outcomes["terminated"][t, row]), bool(outcomes["truncated"][t, row])
            after = 0.0 if terminated else float(cut[t, row]) if truncated else values[t + 1][row]
            error = float(outcomes["reward"][t, row]) + config.gamma * after - values[t][row]
            trace = error + config.gamma * config.gae_lambda * trace * (not (terminated or truncated))
            chosen.append((t, row))
            advantages.append(trace)
    index = tuple(torch.tensor(chosen).unbind(1))
    advantage = torch.tensor(advantages)
    returns = advantage + rollout["value"][index]
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    logits, value = ppo.net(rollout["obs"][index])
    new, old = Categorical(logits=logits), Categorical(logits=rollout["outputs"][index])
    ratio = (new.log_prob(rollout["action"][index]) - old.log_prob(rollout["action"][index])).exp()
    clipped = ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef)
    policy = -torch.minimum(ratio * advantage, clipped * advantage).sum()
    loss = policy + config.value_coef * 0.5 * (value - returns).square().sum()
    return loss - config.entropy_coef * new.entropy().sum(), len(chosen)


def test_loss_and_gradient_equal_those_of_active_rows_alone():
    ppo = build()
    ppo.collect(TrainState(total_samples=1))
    metrics = Metrics()
    batch = ppo._prepare_batch(metrics)
    with torch.no_grad():
        for weight in ppo.net.parameters():
            weight += 0.1 * torch.linspace(-1, 1, weight.numel()).view_as(weight)  # ratios differ from 1
    result = ppo.loss(batch)
    wanted, count = loss_without_inactive_rows(ppo)
    assert 0.3 < count / ppo.samples < 0.9
    assert int(result.num_samples) == count
    assert metrics.global_sums["active_fraction"].tolist() == [count, ppo.samples]
    assert result.loss_sum.item() == pytest.approx(wanted.item(), rel=1e-4)
    torch.testing.assert_close(gradient(ppo, result.loss_sum), gradient(ppo, wanted), rtol=1e-3, atol=1e-4)


def test_content_of_inactive_rows_changes_nothing():
    ppo = build(normalize_obs=True, normalize_rewards=True)
    ppo.collect(TrainState(total_samples=1))
    rollout, outcomes = ppo.collector.rollout, ppo.collector.outcomes
    inactive, state = ~outcomes["active"], {name: tensor.clone() for name, tensor in ppo.shared_state().items()}
    results = []
    for change in (0.0, 3.0):
        ppo.load_shared_state(state)
        ppo.rewards.discounted.zero_()
        for name in ("obs", "value", "outputs"):
            rollout[name][inactive] += change
        rollout["action"][inactive] = int(change > 0)
        metrics = ppo.update(TrainState(total_samples=10**6))
        results.append(({k: form.digest_tensor(k, x) for k, x in ppo.shared_state().items()}, metrics.global_sums))
    assert results[0][0] == results[1][0]
    assert results[0][1].keys() == results[1][1].keys()
    active = int(outcomes["active"].sum())
    assert ppo.normalizer.moments[""].sums[-1] == ppo.rewards.moments.sums[-1] == active
    assert active < ppo.samples


def test_episodes_of_absent_agents_are_not_counted():
    ppo = build()
    metrics, outcomes = ppo.collect(TrainState(total_samples=1)), ppo.collector.outcomes
    ended = outcomes["active"] & (outcomes["terminated"] | outcomes["truncated"])
    lengths, counts = metrics.per_lane["ep_length_mean"].sum(0).tolist()
    open_steps = int(ppo.collector.episodes.lengths.sum())
    assert counts == int(ended.sum())
    # Every active step belongs to an episode that ended, or to one that goes on.
    assert lengths + open_steps == int(outcomes["active"].sum())
    with torch.no_grad():
        ppo.net.policy_head.bias += torch.tensor([-9.0, 9.0])  # the action that is paid
    scores = evaluate(ppo.policy(), TASK, ppo.runtime, episodes=24)
    assert 1 <= scores["length_mean"] <= 9
    assert scores["return_mean"] == scores["length_mean"]
    assert 9 <= scores["team_return_mean"] <= 27


@pytest.mark.parametrize("kind", ["none", "lstm"])
def test_restored_run_with_absent_agents_continues_equally(kind):
    settings = {"recurrent": RecurrentConfig(kind=kind, hidden_size=8), "bptt_steps": 6, "normalize_rewards": True}
    saved, fresh = build(**settings), build(**settings)
    clock = TrainState(total_samples=10**6)

    def iterate(ppo):
        ppo.collect(clock)
        ppo.update(clock)

    iterate(saved)
    fresh.load_shared_state(saved.shared_state())
    for lane in saved.lanes.local:
        fresh.load_lane_state(lane, saved.lane_state(lane))
        fresh.task.load_lane_state(lane, saved.task.lane_state(lane))
    for ppo in (saved, fresh):
        iterate(ppo)
    assert fresh.task.observations().tolist() == saved.task.observations().tolist()
    for name, tensor in saved.shared_state().items():
        assert torch.equal(fresh.shared_state()[name], tensor), name
