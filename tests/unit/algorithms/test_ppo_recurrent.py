"""Recurrent PPO: training sequences reproduce the rollout for any BPTT length; recurrent state belongs to lanes."""

import pytest
import torch

from lockstep.clock import TrainState
from lockstep.config import ConfigError, apply_overrides
from lockstep.distributed import Runtime
from lockstep.metrics import Metrics
from lockstep.nn.recurrent import split_at_resets
from lockstep.pytree import named_leaves, tree_map
from lockstep.registry import find_recipe
from lockstep.tools.bench.autoscale import autoscale


class Agent:
    """A small recurrent agent on CartPole without velocities, where first episodes are short."""

    def __init__(self, hosting=None, settings=None):
        kind = find_recipe("gym-ppo-lstm")
        recipe = apply_overrides(
            apply_overrides(kind(), kind.smoke_overrides), {"task.mask_velocity": True, "run.reduction": "exact"}
        )
        recipe = apply_overrides(recipe, settings or {})
        self.runtime = Runtime.single_process(recipe.run, hosting=hosting)
        self.task = recipe.task.build(self.runtime.lanes, self.runtime.device)
        self.algorithm = recipe.algo.build(self.task, self.runtime)
        self.clock = TrainState(total_samples=recipe.run.total_samples)

    def collect(self):
        self.algorithm.collect(self.clock)

    def learn(self):
        self.algorithm.update(self.clock)
        self.clock.advance(self.algorithm.samples)


def ratios(algorithm):
    """Return probability ratios of sequence evaluation to rollout steps for the last rollout, [N]."""
    rows = algorithm.collector.to_sequences(algorithm._prepare_batch(Metrics()))
    steps = {name: tree_map(lambda x: x.flatten(0, 1), part) for name, part in rows.items() if name != "memory"}
    outputs, value = algorithm.net(algorithm.normalizer(steps["obs"]), rows["memory"], split_at_resets(rows["starts"]))
    log_prob, _ = algorithm.actions.log_prob_and_entropy(outputs, steps["action"])
    torch.testing.assert_close(value, steps["value"], atol=1e-5, rtol=1e-5)
    return (log_prob - steps["log_prob"]).exp()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("sequence", [1, 2, 8, 16, 32])
def test_first_ratio_is_one_for_any_bptt_length(kind, sequence):
    agent = Agent(settings={"algo.bptt_steps": sequence, "algo.batch_size": 256, "algo.recurrent.kind": kind})
    agent.collect()
    agent.learn()
    agent.collect()  # the second rollout starts in the middle of episodes
    ended = agent.algorithm.collector.outcomes["terminated"]
    assert ended.any()
    assert named_leaves(agent.algorithm.collector.sequence_starts["memory"])["policy.hidden"][0].any()
    assert ratios(agent.algorithm).sub(1).abs().max() < 1e-5


def test_ratios_detect_wrong_initial_recurrent_state():
    agent = Agent()
    agent.collect()
    agent.learn()
    agent.collect()
    tree_map(torch.Tensor.zero_, agent.algorithm.collector.sequence_starts["memory"])
    with pytest.raises(AssertionError):
        ratios(agent.algorithm)


def test_truncated_episode_bootstraps_with_its_recurrent_state():
    agent = Agent(settings={"task.env_kwargs": {"max_episode_steps": 5}})
    step, seen, algorithm = agent.task.step, [agent.task.observations().clone()], agent.algorithm
    lasts = []

    def watched(action):
        result = step(action)
        seen.append(result.obs.clone())
        lasts.append(result.final_obs.clone())
        return result

    agent.task.step = watched
    agent.collect()
    assert algorithm.collector.outcomes["truncated"][4].all()
    memory = algorithm.net.initial_state(agent.task.num_envs)
    with torch.no_grad():
        for obs in seen[:5]:
            _, _, memory = algorithm.net.step(obs, memory)
        expected = algorithm.net.value(lasts[4], memory)
        forgotten = algorithm.net.value(lasts[4], algorithm.net.initial_state(agent.task.num_envs))
    torch.testing.assert_close(algorithm.collector.truncation_values[4], expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(forgotten, expected)
    # The next episode starts with the initial state.
    _, value, _ = algorithm.net.step(seen[5], algorithm.net.initial_state(agent.task.num_envs))
    torch.testing.assert_close(algorithm.collector.rollout["value"][5], value, atol=1e-6, rtol=1e-6)


def test_recurrent_state_moves_with_lane_to_another_process():
    whole, part = Agent(), Agent(hosting=range(3, 6))
    whole.collect()
    whole.learn()
    part.algorithm.load_shared_state(whole.algorithm.shared_state())
    for lane in part.runtime.lanes.local:
        part.algorithm.load_lane_state(lane, whole.algorithm.lane_state(lane))
        part.task.load_lane_state(lane, whole.task.lane_state(lane))
    part.clock = whole.clock
    for agent in (whole, part):
        agent.collect()
    for lane in part.runtime.lanes.local:
        mine, theirs = part.algorithm.lane_state(lane), whole.algorithm.lane_state(lane)
        assert mine["collector.memory.policy.cell"].any()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bptt_steps": 5}, "bptt_steps is 5, which does not divide a rollout_steps of 32"),
        (
            {"bptt_steps": None, "batch_size": 128},
            "8 lanes with sequences of 32 steps cannot share evenly.\nUse 256 or",
        ),
    ],
)
def test_sequences_that_do_not_divide_evenly_are_rejected(settings, words):
    kind = find_recipe("gym-ppo-lstm")
    recipe = apply_overrides(apply_overrides(kind(), kind.smoke_overrides), {"algo": settings})
    with pytest.raises(ConfigError, match=words):
        recipe.algo.validate(recipe.task, recipe.run)


def test_bptt_steps_without_recurrent_layer_is_ignored():
    recipe = apply_overrides(find_recipe("gym-ppo")(), {"algo.bptt_steps": 7})
    recipe.algo.validate(recipe.task, recipe.run)


def test_autoscale_keeps_settings_of_recurrent_recipe():
    kind = find_recipe("gym-ppo-lstm")
    choice = autoscale(apply_overrides(kind(), kind.smoke_overrides), 1)
    assert choice.settings == {}
    assert "sequences" in choice.reasons[0]
