"""Actor-critic: output shapes, shared and separate encoders, initialization and precision."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import ConfigError, RunConfig
from lockstep.distributed import Runtime
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.recurrent import RecurrentConfig
from lockstep.rng import RandomStream, seeded_init
from lockstep.tasks.gym.env import GymConfig

VECTOR = spaces.Box(-1, 1, (5,), np.float32)
BOARD = spaces.Box(0, 1, (3, 6, 6), np.uint8)
OBSERVATIONS = {
    "vector": (VECTOR, torch.randn(7, 5, generator=torch.Generator().manual_seed(0))),
    "board": (BOARD, torch.randint(2, (7, 3, 6, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)),
}
OBSERVATIONS["dict"] = (
    spaces.Dict({name: space for name, (space, _) in OBSERVATIONS.items()}),
    {name: obs for name, (_, obs) in OBSERVATIONS.items()},
)
ACTIONS = {
    "choice": (spaces.Discrete(4), 4),
    "choices": (spaces.MultiDiscrete([2, 3]), 5),
    "continuous": (spaces.Box(-1, 1, (3,), np.float32), 6),
}
each_observation = pytest.mark.parametrize(("space", "obs"), OBSERVATIONS.values(), ids=OBSERVATIONS)


def build(space, action_space=ACTIONS["choice"][0], **settings):
    with seeded_init(RandomStream(0, "init")):
        return ActorCritic(
            space, make_distribution(action_space), EncoderConfig(hidden_sizes=(8,), out_features=16, **settings)
        )


@each_observation
@pytest.mark.parametrize(("action_space", "outputs"), ACTIONS.values(), ids=ACTIONS)
def test_forward_returns_action_params_and_one_value(space, obs, action_space, outputs):
    found, value = build(space, action_space)(obs)
    assert found.shape == (7, outputs)
    assert value.shape == (7,)
    assert found.dtype == value.dtype == torch.float32


@pytest.mark.parametrize("action_space", [spaces.Discrete(4), spaces.Tuple([VECTOR, spaces.Discrete(4)])])
def test_action_mask_changes_outputs_of_illegal_choices_only(action_space):
    vector, mask = OBSERVATIONS["vector"][1], torch.tensor([[1, 0, 1, 0]] * 7, dtype=torch.uint8)
    space = spaces.Dict({"sight": VECTOR, "action_mask": spaces.Box(0, 1, (4,), np.uint8)})
    net, plain = build(space, action_space), build(VECTOR, action_space)
    outputs, value = net({"sight": vector, "action_mask": mask})
    expected, expected_value = plain(vector)  # the network is that without a mask
    assert (outputs[:, [1, 3]] == -torch.inf).all()
    assert torch.equal(outputs[:, [0, 2]], expected[:, [0, 2]])
    assert torch.equal(outputs[:, 4:], expected[:, 4:])
    assert torch.equal(value, expected_value)
    assert torch.equal(net.value({"sight": vector, "action_mask": mask}), value)


CRITIC_SPACE = spaces.Dict([("sight", VECTOR), ("critic", spaces.Dict({"board": BOARD}))])
CRITIC_OBS = {"sight": OBSERVATIONS["vector"][1], "critic": {"board": OBSERVATIONS["board"][1]}}


@pytest.mark.parametrize("kind", ["none", "gru"])
@pytest.mark.parametrize("masked", [False, True])
def test_critic_part_is_seen_by_the_value_only(kind, masked):
    mask = {"action_mask": torch.tensor([[1, 0, 1, 1]] * 7, dtype=torch.uint8)} if masked else {}
    space = spaces.Dict([*CRITIC_SPACE.items(), *[(name, spaces.Box(0, 1, (4,), np.uint8)) for name in mask]])
    recurrent = RecurrentConfig(kind=kind, hidden_size=6)
    with seeded_init(RandomStream(0, "init")):
        net = ActorCritic(space, make_distribution(spaces.Discrete(4)), EncoderConfig(hidden_sizes=(8,)), recurrent)
    obs = CRITIC_OBS | mask
    memory = net.initial_state(7)
    outputs, value, after = net.step(obs, memory)
    other, other_value, _ = net.step(obs | {"critic": {"board": 1 - CRITIC_OBS["critic"]["board"]}}, memory)
    assert torch.equal(other, outputs)
    assert not torch.isclose(other_value, value).any()
    assert torch.equal(net.value(obs, memory), value)
    # The policy acts without the part.
    alone, next_memory = net.act({name: part for name, part in obs.items() if name != "critic"}, memory)
    assert torch.equal(alone, outputs)
    assert next_memory.keys() == after.keys() - {"value"}
    assert all(torch.equal(x, after["policy"][name]) for name, x in next_memory.get("policy", {}).items())


def test_critic_part_needs_separate_encoders():
    net = build(CRITIC_SPACE)  # the value function has a CNN
    assert gradients_of(net, net(CRITIC_OBS)[0].square().sum()) == {"encoder", "policy_head"}
    assert gradients_of(net, net(CRITIC_OBS)[1].sum()) == {"critic_encoder", "value_head"}
    with pytest.raises(ConfigError, match="share_encoder is true, but only the value function sees the part critic"):
        build(CRITIC_SPACE, share_encoder=True)
    with pytest.raises(ConfigError, match="no part but critic"):
        build(spaces.Dict({"critic": VECTOR}))


@each_observation
def test_value_equals_value_of_forward(space, obs):
    net = build(space)
    assert torch.equal(net.value(obs), net(obs)[1])


def gradients_of(net, total):
    net.zero_grad()
    total.backward()
    return {name.partition(".")[0] for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}


def test_vector_observations_use_separate_encoders():
    net, obs = build(VECTOR), OBSERVATIONS["vector"][1]
    assert gradients_of(net, net(obs)[0].square().sum()) == {"encoder", "policy_head"}
    assert gradients_of(net, net(obs)[1].sum()) == {"critic_encoder", "value_head"}


@pytest.mark.parametrize("kind", ["board", "dict"])
def test_image_observations_share_encoder(kind):
    space, obs = OBSERVATIONS[kind]
    net = build(space)
    assert gradients_of(net, net(obs)[0].square().sum()) == {"encoder", "policy_head"}
    assert gradients_of(net, net(obs)[1].sum()) == {"encoder", "value_head"}


@each_observation
def test_share_encoder_true_shares_encoder(space, obs):
    net = build(space, share_encoder=True)
    assert net.critic_encoder is None
    assert gradients_of(net, net(obs)[0].square().sum()) == {"encoder", "policy_head"}
    assert gradients_of(net, net(obs)[1].sum()) == {"encoder", "value_head"}
    assert torch.equal(net.value(obs), net(obs)[1])


@each_observation
def test_share_encoder_false_uses_separate_encoders(space, obs):
    net = build(space, share_encoder=False)
    assert gradients_of(net, net(obs)[0].square().sum()) == {"encoder", "policy_head"}
    assert gradients_of(net, net(obs)[1].sum()) == {"critic_encoder", "value_head"}
    assert torch.equal(net.value(obs), net(obs)[1])


def test_mlp_on_board_uses_separate_encoders():
    obs = OBSERVATIONS["board"][1]
    net = build(BOARD, kind="mlp")
    assert gradients_of(net, net(obs)[0].square().sum()) == {"encoder", "policy_head"}
    assert gradients_of(net, net(obs)[1].sum()) == {"critic_encoder", "value_head"}


def test_initial_policy_is_nearly_uniform():
    outputs, value = build(BOARD)(OBSERVATIONS["board"][1])
    assert outputs.softmax(-1).sub(0.25).abs().max() < 0.02
    assert value.std() > 0.02  # the encoder is not dead: the small outputs come from the gain of the head


def test_log_std_is_one_parameter_per_action_feature():
    net, obs = build(VECTOR, ACTIONS["continuous"][0]), OBSERVATIONS["vector"][1]
    with torch.no_grad():
        net.log_std.copy_(torch.tensor([0.1, 0.2, 0.3]))
    outputs, _ = net(obs)
    assert torch.equal(outputs[:, 3:], net.log_std.expand(7, 3))
    outputs[:, 3:].sum().backward()
    assert net.log_std.grad.tolist() == [7.0, 7.0, 7.0]


def test_log_std_init_of_ppo_is_that_of_its_network():
    runtime = Runtime.single_process(RunConfig(device="cpu"), hosting=None)
    task = GymConfig(id="Pendulum-v1").build(runtime.lanes, runtime.device)
    assert PPOConfig(log_std_init=-0.5).build(task, runtime).net.log_std.tolist() == [-0.5]


@each_observation
def test_autocast_outputs_are_float32(space, obs):
    net = build(space)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, value = net(obs)
        alone = net.value(obs)
    assert outputs.dtype == value.dtype == alone.dtype == torch.float32
    torch.testing.assert_close(value, net(obs)[1], atol=0.1, rtol=0.1)
