"""TD-MPC2 on several processes trains one model: gradients, scale, targets and task embeddings are equal."""

from dataclasses import replace

import pytest
import torch
from problems import digest, distance

from helpers.multiprocess import together
from helpers.toy_envs import ToyWorldsConfig
from lockstep.algorithms.tdmpc2.agent import TDMPC2Config
from lockstep.algorithms.tdmpc2.losses import model_loss, policy_loss
from lockstep.algorithms.tdmpc2.mppi import PlanConfig
from lockstep.algorithms.tdmpc2.world_model import WorldModelConfig
from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.data.replay_buffer import add_rollout
from lockstep.distributed import Runtime
from lockstep.training_loop import iterate

pytestmark = pytest.mark.distributed

LANES = 4
CONFIG = TDMPC2Config(
    batch_size=16,
    seed_samples=64,
    buffer_size=800,
    updates_per_sample=0.1,
    episodic=True,
    tau=0.5,
    plan=PlanConfig(num_samples=8, num_policy_samples=2, num_elites=3, iterations=2),
    model=WorldModelConfig(size=1, encoder=16, width=16, latent=16, num_q=3, bins=11),
)
WORLDS = ToyWorldsConfig(num_envs=LANES, num_tasks=4)
"""A different task for each lane, so that no two processes have the same task."""


def run_config(**options):
    return RunConfig(**{"lanes": LANES, "device": "cpu", "collective_timeout": 30.0} | options)


class Agent:
    def __init__(self, runtime, worlds=WORLDS, config=CONFIG):
        self.runtime = runtime
        self.task = worlds.build(runtime.lanes, runtime.device)
        self.algorithm = config.build(self.task, runtime)
        self.clock = TrainState(total_samples=10**6)

    def fill(self, steps=20):
        """Collect random rollouts and perturb all networks, equally on every process."""
        for _ in range(steps):
            a = self.algorithm
            a.collect(self.clock)
            assert add_rollout(a.replay, a.rollout, a.outcomes, a.model_optimizer, self.clock)
            self.clock.advance(self.algorithm.samples)
        draws = torch.Generator().manual_seed(5)
        for parameter in [*self.algorithm.model.parameters(), *self.algorithm.targets.parameters()]:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
        self.algorithm.model.critics[-1].weight.data *= 20  # value range above 1
        return self

    def iterate(self, count):
        for _ in range(count):
            iterate(self.task, self.algorithm, self.clock, self.runtime, check_every=16)
        return self


def gradient_of(optimizer):
    """Return the gradient by parameter after a step: divided by the global sample count."""
    parameters = optimizer.gradient.parameters
    flat = optimizer.gradient.flat.split([p.numel() for p in parameters])
    return {optimizer._names[p]: x.view_as(p) for p, x in zip(parameters, flat, strict=True)}


def stepped(runtime):
    """Return the gradients of one update, and the scale after it."""
    agent = Agent(runtime).fill()
    algorithm = agent.algorithm
    batch = algorithm._sample_batch(algorithm.updates)
    algorithm.model_optimizer.step(algorithm.model_loss, batch)
    seen = {"z": algorithm.latents} | {name: batch[name] for name in ("task", "whole", "policy", "policy_kept")}
    algorithm._rescale(seen)
    algorithm.policy_optimizer.step(algorithm.policy_loss, seen)
    both = algorithm.model_optimizer, algorithm.policy_optimizer
    return [gradient_of(optimizer) for optimizer in both], algorithm.scale.item()


def on_processes(reduction):
    with Runtime.start(run_config(reduction=reduction)) as runtime:
        gradients, scale = stepped(runtime)
        tasks = sorted(set(Agent(runtime).task.observations()["task"].tolist()))
        return {
            "gradients": [{name: x.tolist() for name, x in each.items()} for each in gradients],
            "digest": [digest(each) for each in gradients],
            "scale": scale,
            "tasks": tasks,
        }


def plain(hosting=None):
    """Return plain torch's gradients and scale for the batch of the hosted lanes, by default all lanes."""
    agent = Agent(Runtime.single_process(run_config(), hosting=hosting)).fill()
    algorithm, model = agent.algorithm, agent.algorithm.model
    batch = algorithm._sample_batch(algorithm.updates)
    loss, latents = model_loss(
        model, algorithm.targets, algorithm.discounts, algorithm.pairs[0], algorithm.config.loss, batch
    )
    rest = {name: p for name, p in model.named_parameters() if not name.startswith("policy.")}
    own = {name: p for name, p in model.named_parameters() if name.startswith("policy.")}
    slopes = dict(zip(rest, torch.autograd.grad(loss.loss_sum / loss.num_samples, list(rest.values())), strict=True))
    # The policy's step follows the model's, so take the model step and update the scale first.
    algorithm.model_optimizer.step(algorithm.model_loss, batch)
    seen = batch | {"z": latents}
    algorithm._rescale({name: seen[name] for name in ("z", "task", "whole", "policy", "policy_kept")})
    later = policy_loss(model, algorithm.scale, algorithm.pairs[1], algorithm.config.loss, seen)
    policy = dict(zip(own, torch.autograd.grad(later.loss_sum / later.num_samples, list(own.values())), strict=True))
    return [slopes, policy], algorithm.scale.item()


@pytest.mark.parametrize("processes", [2, 3])
def test_tdmpc2_gradients_match_plain_torch_on_the_global_batch(processes):
    wanted, scale = plain()
    alone, alone_scale = plain(hosting=range(1))
    found = together(on_processes, processes, "fast")
    for outcome in found:
        for ours, theirs in zip(outcome["gradients"], wanted, strict=True):
            assert distance({name: torch.tensor(x) for name, x in ours.items()}, theirs) < 1e-4
        assert outcome["scale"] == pytest.approx(scale, rel=1e-5)  # values are exponentials of the sums
    assert distance(alone[0], wanted[0]) > 0.1  # without reduction the gradient would differ
    assert scale > 1.0
    assert alone_scale != pytest.approx(scale, rel=1e-3)


def test_tdmpc2_exact_gradients_and_scale_are_bitwise_equal_on_1_2_4_ranks():
    (one,), two, four = (together(on_processes, processes, "exact") for processes in (1, 2, 4))
    assert all(outcome["digest"] == one["digest"] for outcome in (*two, *four))
    assert all(outcome["scale"] == one["scale"] for outcome in (*two, *four))
    assert [outcome["tasks"] for outcome in two] == [[0, 1], [2, 3]]


def trained(iterations):
    with Runtime.start(run_config()) as runtime:
        algorithm = Agent(runtime).iterate(iterations).algorithm
        state = algorithm.shared_state()
        moved = algorithm.model.task.weight.detach()
        return {"digests": {name: digest({name: tensor}) for name, tensor in state.items()}, "tasks": moved.tolist()}


def test_tdmpc2_state_is_equal_on_ranks_with_different_tasks():
    one, two = together(trained, 2, 60)
    assert one["digests"] == two["digests"]
    assert {"scale", "model.task.weight", "targets.0.weight"} <= one["digests"].keys()
    fresh = Agent(Runtime.single_process(run_config())).algorithm.model.task.weight
    assert all(
        torch.tensor(row).sub(old).abs().max() > 0 for row, old in zip(one["tasks"], fresh.detach(), strict=True)
    )


def ended_early(steps):
    with Runtime.start(run_config()) as runtime:
        brief = replace(CONFIG, updates_per_sample=0.05, plan=replace(CONFIG.plan, iterations=1))
        agent = Agent(runtime, ToyWorldsConfig(num_envs=LANES, ends=0.2), brief)
        agent.iterate(steps)
        ends = agent.algorithm.replay.buffers["terminated"].flatten(1)
        return {"digest": digest(agent.algorithm.shared_state()), "ends": ends.long().sum(1).tolist()}


def test_tdmpc2_episodes_ending_at_different_times_do_not_hang():
    found = together(ended_early, 2, 300)  # four environments
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["ends"] != found[1]["ends"]
    assert min(found[0]["ends"] + found[1]["ends"]) > 10
