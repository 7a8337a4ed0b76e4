"""World model: parameter counts of the reference, batched critics, tasks and reference weight layout."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lockstep.algorithms.tdmpc2.reference_weights import from_reference, model_settings, to_reference
from lockstep.algorithms.tdmpc2.world_model import SIZES, QEnsemble, WorldModel, WorldModelConfig
from lockstep.config import ConfigError
from lockstep.pytree import load_into
from lockstep.rng import RandomStream, seeded_init

COUNTS = {
    1: (1_198_257, 1_214_651, 1_339_387),
    5: (4_932_704, 4_960_618, 5_159_082),
    19: (17_996_896, 18_062_442, 18_561_194),
    48: (47_093_600, 47_208_298, 48_081_066),
    317: (312_271_823, 312_595_417, 314_983_449),
}
"""Parameter counts of the reference implementation on cartpole, walker and dog."""
BODIES = ((5, 1), (24, 6), (223, 38))
"""Observation and action features of cartpole, walker and dog."""
TINY = WorldModelConfig(size=1, encoder=16, width=24, latent=16, num_q=3, bins=11)


def space(features):
    return Box(-np.inf, np.inf, (features,), np.float32)


def build(actions=(2,), features=4, config=TINY, seed=0, **options):
    with seeded_init(RandomStream(seed, "model")):
        return WorldModel(config, space(features), actions, **options)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_match_reference(size):
    with torch.device("meta"):
        models = [WorldModel(WorldModelConfig(size=size), space(d), (k,)) for d, k in BODIES]
    assert tuple(sum(p.numel() for p in model.parameters()) for model in models) == COUNTS[size]


def test_batched_critics_equal_single_critics():
    critics = build().critics
    torch.nn.init.normal_(critics[2].weight)
    x = noise(5, 3, 18)
    together = critics(x)
    assert together.shape == (3, 5, 3, 11)
    for number in range(3):
        alone = QEnsemble(1, 18, 24, 11)
        for mine, theirs in zip(alone.parameters(), critics.parameters(), strict=True):
            mine.data.copy_(theirs[number : number + 1])
        torch.testing.assert_close(together[number], alone(x)[0])
    some = critics(x, torch.tensor([2, 0]))
    torch.testing.assert_close(some, together[[2, 0]])


def test_critic_matches_reference_layers():
    critics, x = build().critics, noise(7, 18)
    torch.nn.init.normal_(critics[2].weight)
    hidden = x
    for layer in list(critics)[:2]:
        hidden = torch.nn.functional.linear(hidden, layer.weight[1], layer.bias[1])
        hidden = torch.nn.functional.layer_norm(hidden, (24,), layer.ln.weight[1], layer.ln.bias[1])
        hidden = torch.nn.functional.mish(hidden)
    plain = torch.nn.functional.linear(hidden, critics[2].weight[1], critics[2].bias[1])
    torch.testing.assert_close(critics(x)[1], plain, rtol=1e-4, atol=1e-5)


def test_initial_rewards_and_values_are_zero():
    model = build()
    z = model.encode(noise(3, 4), None)
    joint = model.joint(z, noise(3, 2), None)
    assert not model.reward(joint).any()
    assert not model.critics(joint).any()
    assert model.q_value(model.critics, z, noise(3, 2), None, torch.tensor([0, 1])).abs().max() < 1e-5


def test_latents_are_simplices():
    model = build()
    z = model.encode(noise(3, 4), None)
    for latent in (z, model.dynamics(model.joint(z, noise(3, 2), None))):
        torch.testing.assert_close(latent.unflatten(-1, (2, 8)).sum(-1), torch.ones(3, 2))


def test_policy_entropy_is_noise_entropy_times_action_features():
    model, draws = build(), noise(6, 2)
    z = model.encode(noise(6, 4), None)
    acted = model.act(z, draws, None)
    mean, log_std = model.policy(z).chunk(2, -1)
    log_std = -10 + 6 * (log_std.tanh() + 1)
    normal = torch.distributions.Normal(mean, log_std.exp())
    drawn = mean + draws * log_std.exp()
    torch.testing.assert_close(acted.action, drawn.tanh())
    torch.testing.assert_close(acted.entropy, -2 * normal.log_prob(drawn).sum(-1), rtol=1e-4, atol=1e-4)


def test_act_uses_only_action_features_of_the_task():
    model = build(actions=(1, 3))
    task = torch.tensor([0, 1])
    z, draws = model.encode(noise(2, 4), task), noise(2, 3)
    acted = model.act(z, draws, task)
    assert acted.action[0, 1:].tolist() == [0.0, 0.0]
    assert acted.action[1].all()
    draws[0, 1:] = 9.0
    # The noise of unused features does not count.
    torch.testing.assert_close(model.act(z, draws, task).entropy, acted.entropy)


def test_shorten_tasks_clips_embedding_norms_to_one():
    model = build(actions=(1, 1, 1))
    model.task.weight.data[0] *= 1000
    before = model.task.weight.detach().clone()
    model.limit_task_norms()
    assert model.task.weight[0].norm().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(model.task.weight[1:], before[1:])


def test_image_observations_have_512_latent_features():
    pictures = Box(0, 255, (9, 64, 64), np.uint8)
    model = WorldModel(TINY, pictures, (2,))
    z = model.encode(torch.randint(0, 256, (2, 3, 9, 64, 64), dtype=torch.uint8, generator=torch.Generator()), None)
    assert z.shape == (2, 3, 512)
    assert model.latent == 512


@pytest.mark.parametrize("wrong", [{"latent": 12}, {"num_q": 1}, {"width": 0}])
def test_invalid_model_shape_is_rejected(wrong):
    with pytest.raises(ConfigError, match="latent that is a multiple of 8"):
        WorldModelConfig(size=1, **wrong).shape()


# ----------------------------------------------------------------------------------------------------- reference layout


class Weights:
    """A model and its target critics with the names of the algorithm state."""

    def __init__(self, seed, **options):
        self.model = build(seed=seed, **options)
        self.targets = QEnsemble(3, self.model.critics[0].weight.shape[2], 24, 11)
        for number, parameter in enumerate([*self.model.parameters(), *self.targets.parameters()]):
            parameter.data = noise(*parameter.shape, seed=seed + number)

    def named(self):
        nets = {"model": self.model, "targets": self.targets}
        return {f"{n}.{name}": x for n, net in nets.items() for name, x in net.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("options", [{}, {"episodic": True}, {"actions": (1, 3)}])
@pytest.mark.parametrize("older", [False, True])
def test_reference_weights_load_and_give_equal_outputs(options, older):
    theirs, ours = Weights(100, **options), Weights(900, **options)
    written = to_reference(theirs.named(), theirs.model.masks)
    assert {
        "_encoder.state.0.weight",
        "_encoder.state.1.ln.bias",
        "_pi.2.weight",
        "_reward.0.ln.weight",
    } <= written.keys()
    assert written["_Qs.params.0.weight"].shape[0] == 3
    if older:
        written = as_older(written)
    load_into(ours.named(), from_reference(written), "the agent")
    theirs.model.limit_task_norms()  # as the reference does when it reads an embedding
    tasks = torch.tensor([0, 1, 1]) if len(theirs.model.masks) > 1 else None
    obs, action = noise(3, 4), noise(3, theirs.model.actions)
    for net in (ours, theirs):
        net.z = net.model.encode(obs, tasks)
        joint = net.model.joint(net.z, action, tasks)
        net.outputs = [net.z, net.model.dynamics(joint), net.model.reward(joint), net.model.critics(joint)]
        net.outputs += [net.targets(joint), net.model.act(net.z, action, tasks).action]
    assert all(torch.equal(a, b) for a, b in zip(ours.outputs, theirs.outputs, strict=True))


def as_older(written):
    """Rename critics to the older layout, which numbers the tensors of all layers."""
    leaves = ("weight", "bias", "ln.weight", "ln.bias")
    renamed = {}
    for name, tensor in written.items():
        for prefix, old in (("_Qs.params.", "_Qs.params."), ("_target_Qs_params.", "_target_Qs.params.")):
            if name.startswith(prefix):
                layer, _, leaf = name.removeprefix(prefix).partition(".")
                renamed[f"{old}{4 * int(layer) + leaves.index(leaf)}"] = tensor
        if "Qs" not in name:
            renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("size", [1, 5, 19, 48])
def test_model_settings_find_the_size_from_tensors(size):
    with torch.device("meta"):
        model = WorldModel(WorldModelConfig(size=size), space(4), (2,))
    named = {f"model.{name}": x for name, x in model.state_dict().items()}
    named |= {f"targets.{name}": x for name, x in model.critics.state_dict().items()}
    assert model_settings(named) == {"size": size, "bins": 101}


def test_model_settings_name_what_differs_from_a_size():
    config = WorldModelConfig(size=19, latent=512, task_embedding=64)  # the reference's model of 19 M for mt30
    with torch.device("meta"):
        model = WorldModel(config, space(4), (2, 1))
    named = {f"model.{name}": x for name, x in model.state_dict().items()}
    named |= {f"targets.{name}": x for name, x in model.critics.state_dict().items()}
    assert model_settings(named) == {"size": 19, "latent": 512, "bins": 101, "task_embedding": 64}


def test_from_reference_rejects_unrelated_weights():
    with pytest.raises(ValueError, match="no target critics"):
        from_reference({"layer.weight": torch.zeros(2)})
