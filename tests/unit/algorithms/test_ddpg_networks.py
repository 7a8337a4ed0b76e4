"""DDPG networks: action codecs (selection, storage, execution), shared team actors, critics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from lockstep.algorithms.ddpg.networks import AgentAxis, ContinuousCodec, DiscreteCodec, make_action_codec
from lockstep.config import ConfigError
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.q_networks import Actor
from lockstep.rng import LaneStreams, RandomStream

STREAMS = LaneStreams((RandomStream(0, "test", 0), RandomStream(0, "test", 1)))
LEGAL = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]], dtype=torch.uint8)


def team_task(agents=3):
    seen, legal = Box(-1, 1, (agents, 5), np.float32), Box(0, 1, (agents, 4), np.uint8)
    space = Dict([("seen", seen), ("legal", legal)])
    return SimpleNamespace(agents=agents, observation_space=space, action_space=MultiDiscrete([4] * agents))


def test_discrete_act_is_one_hot_forward_and_softmax_backward():
    outputs = torch.tensor([[1.0, 3.0, 0.0, 2.0], [0.5, 0.0, 2.0, 0.0]], requires_grad=True)
    vector = DiscreteCodec(4, temperature=2.0).act(outputs, None, None)
    assert vector.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]  # exactly
    weights = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    (vector * weights).sum().backward()
    again = outputs.detach().clone().requires_grad_()
    ((again / 2.0).softmax(-1) * weights).sum().backward()
    assert torch.allclose(outputs.grad, again.grad)


def test_discrete_codec_never_selects_illegal_actions():
    choice = DiscreteCodec(4, 1.0)
    outputs = torch.tensor([[0.0, 99.0, 0.0, 0.0], [99.0, 0.0, 0.0, 0.0]]).repeat(200, 1).requires_grad_()
    legal, uniform = LEGAL.repeat(200, 1), torch.rand(400, 4, generator=torch.Generator().manual_seed(0))
    noise = choice.noise(STREAMS, 0, 200).flatten(0, 1)
    for chosen in (choice.act(outputs, noise, legal), choice.act(outputs, None, legal), choice.random(uniform, legal)):
        assert (chosen.detach() * (legal == 0)).sum() == 0
        assert torch.equal(chosen.detach().sum(-1), torch.ones(400))
    choice.act(outputs, noise, legal).square().sum().backward()
    assert not outputs.grad[legal == 0].any()
    assert outputs.grad.isfinite().all()


def test_discrete_noise_samples_from_softmax():
    choice = DiscreteCodec(3, 1.0)
    shares = torch.tensor([0.2, 0.3, 0.5])
    chosen = choice.act(shares.log().expand(20_000, 3), choice.noise(STREAMS, 0, 10_000).flatten(0, 1), None)
    assert torch.allclose(chosen.mean(0), shares, atol=0.015)
    anything = choice.random(torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0)), None)
    assert torch.allclose(anything.mean(0), torch.full((3,), 1 / 3), atol=0.015)


def test_codec_encode_and_vector_are_inverse():
    choice, motion = DiscreteCodec(4, 1.0), ContinuousCodec(Box(-3, 1, (2,), np.float32), 0.1)
    for moves, vector in ((choice, torch.eye(4)), (motion, torch.rand(50, 2) * 2 - 1)):
        assert torch.equal(moves.vector(moves.encode(vector)), vector)
        assert moves.encode(vector).dtype == moves.example.dtype
        assert moves.encode(vector).shape[1:] == moves.example.shape
    assert choice.to_env(torch.tensor([2])).tolist() == [2]
    assert motion.to_env(torch.tensor([[-1.0, 1.0], [0.0, 0.5]])).tolist() == [[-3, 1], [-1, 0]]


def test_continuous_act_with_noise_stays_within_bounds():
    motion = ContinuousCodec(Box(-2, 2, (1,), np.float32), 0.1)
    acted = motion.act(torch.tensor([[5.0], [-5.0], [0.0]]), torch.tensor([[3.0], [-3.0], [0.25]]), None)
    assert acted.tolist() == [[1], [-1], [0.25]]
    assert motion.target_noise(torch.tensor([9.0, -9.0, 1.0]), 0.2).tolist() == pytest.approx([0.5, -0.5, 0.2])
    assert DiscreteCodec(3, 1.0).target_noise(torch.tensor([9.0]), 0.5).tolist() == [4.5]
    assert motion.random(torch.tensor([[0.0], [0.75]]), None).tolist() == [[-1], [0.5]]


@pytest.mark.parametrize("space", [MultiDiscrete([3, 3]), Box(-np.inf, np.inf, (2,)), Box(-1, 1, (2, 2))])
def test_make_action_codec_rejects_unsupported_spaces(space):
    with pytest.raises(ConfigError, match="Use Discrete or a bounded one-dimensional Box"):
        make_action_codec(space, 1.0, 0.1)


def test_agent_axis_gives_actor_single_and_critic_joint_observation():
    team = AgentAxis(team_task())
    obs = {"seen": torch.arange(30.0).view(2, 3, 5), "legal": torch.ones(2, 3, 4, dtype=torch.uint8)}
    seen, legal = team.agent_inputs(obs)
    assert torch.equal(seen, obs["seen"].view(6, 5))
    assert legal.shape == (6, 4)
    assert team.joint_obs(obs) is obs["seen"]
    assert (team.multi_agent, team.agents) == (True, 3)
    assert team.agent_space.shape == (5,)
    assert team.joint_space.shape == (3, 5)
    assert team.action_space == Discrete(4)


def test_agent_axis_of_single_agent_returns_observation_unchanged():
    task = SimpleNamespace(observation_space=Box(-1, 1, (5,), np.float32), action_space=Box(-1, 1, (2,), np.float32))
    team, obs = AgentAxis(task), torch.zeros(7, 5)
    assert team.agent_inputs(obs) == (obs, None)
    assert (team.multi_agent, team.agents, team.agent_space) == (False, 1, task.observation_space)


def test_agent_axis_keeps_dict_observations():
    task = team_task()
    task.observation_space = Dict([("a", Box(0, 1, (3, 2))), ("b", Box(0, 1, (3, 4))), ("legal", Box(0, 1, (3, 4)))])
    team = AgentAxis(task)
    assert {name: part.shape for name, part in team.agent_space.items()} == {"a": (2,), "b": (4,)}
    seen, _ = team.agent_inputs({"a": torch.zeros(7, 3, 2), "b": torch.zeros(7, 3, 4), "legal": torch.ones(7, 3, 4)})
    assert {name: part.shape for name, part in seen.items()} == {"a": (21, 2), "b": (21, 4)}
    actor = Actor(team.agent_space, 4, EncoderConfig(hidden_sizes=(8,), activation="relu"))
    assert actor(seen).shape == (21, 4)
