"""Actors and critics of off-policy algorithms: shapes, the layer that receives the action, target networks."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from torch import nn

from lockstep.nn.action_bounds import ActionBounds
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.q_networks import Actor, Critic, VectorCritic, make_critic, soft_update

SMALL = EncoderConfig(hidden_sizes=(8,), activation="relu")
VECTOR = Box(-1, 1, (5,))


@pytest.mark.parametrize("action_input", ["first", "last"])
def test_critic_returns_one_value_per_agent(action_input):
    team = make_critic(Box(-1, 1, (3, 5)), 12, 3, SMALL, action_input)
    assert team(torch.zeros(2, 3, 5), torch.zeros(2, 12)).shape == (2, 3)
    one = make_critic(VECTOR, 4, 1, SMALL, action_input)
    assert one(torch.zeros(6, 5), torch.zeros(6, 4)).shape == (6, 1)


def linear_shapes(net):
    return [tuple(layer.weight.shape) for layer in net.modules() if isinstance(layer, nn.Linear)]


def test_critic_action_input_chooses_the_layer_that_sees_the_action():
    assert linear_shapes(make_critic(VECTOR, 2, 1, SMALL, "first")) == [(8, 7), (8, 8), (1, 8)]
    assert linear_shapes(make_critic(VECTOR, 2, 1, SMALL, "last")) == [(8, 5), (8, 8), (8, 10), (1, 8)]


def test_critic_value_depends_on_observation_and_action():
    torch.manual_seed(0)
    critic = make_critic(VECTOR, 2, 1, SMALL, "first")
    assert isinstance(critic, VectorCritic)
    obs, action = torch.randn(4, 5, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    critic(obs, action).sum().backward()
    assert obs.grad.abs().sum() > 0
    assert action.grad.abs().sum() > 0


@pytest.mark.parametrize("space", [Box(0, 255, (16, 16, 3), np.uint8), Dict(a=VECTOR, b=VECTOR)])
def test_action_joins_after_the_encoder_of_images_and_dicts(space):
    assert isinstance(make_critic(space, 2, 1, SMALL, "first"), Critic)


def test_encoder_uses_configured_activation():
    kinds = {
        activation: {type(x).__name__ for x in Actor(VECTOR, 4, EncoderConfig(activation=activation)).modules()}
        for activation in ("tanh", "relu")
    }
    assert "Tanh" in kinds["tanh"]
    assert "ReLU" in kinds["relu"]
    assert "Tanh" not in kinds["relu"]


def test_soft_update_moves_parameters_by_tau():
    target, source = nn.Linear(2, 1), nn.Linear(2, 1)
    before = target.weight.detach().clone()
    soft_update(target, source, 0.25)
    torch.testing.assert_close(target.weight.detach(), before + 0.25 * (source.weight.detach() - before))


def test_action_bounds_map_to_the_limits_of_the_space():
    bounds = ActionBounds(Box(np.float32([-2, 0]), np.float32([2, 1])))
    assert bounds.to_env(torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])).tolist() == [[-2, 0], [2, 1], [0, 0.5]]
