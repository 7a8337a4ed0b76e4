"""The world model: as many parameters as its authors count, critics in one product, tasks, and their layout."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lockstep.algorithms.tdmpc2.reference_weights import from_reference, to_reference
from lockstep.algorithms.tdmpc2.world_model import SIZES, QEnsemble, WorldModel, WorldModelConfig
from lockstep.config import ConfigError
from lockstep.nn.initialization import seeded_init
from lockstep.pytree import load_into
from lockstep.rng import RandomStream

COUNTS = {
    1: (1_198_257, 1_214_651, 1_339_387),
    5: (4_932_704, 4_960_618, 5_159_082),
    19: (17_996_896, 18_062_442, 18_561_194),
    48: (47_093_600, 47_208_298, 48_081_066),
    317: (312_271_823, 312_595_417, 314_983_449),
}
"""Of the reference implementation, on cartpole, walker and dog."""
BODIES = ((5, 1), (24, 6), (223, 38))
"""Their observation and action features."""
TINY = WorldModelConfig(size=1, encoder=16, width=24, latent=16, num_q=3, bins=11)


def space(features):
    return Box(-np.inf, np.inf, (features,), np.float32)


def build(actions=(2,), features=4, config=TINY, seed=0, **options):
    with seeded_init(RandomStream(seed, "model")):
        return WorldModel(config, space(features), actions, **options)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_as_many_parameters_as_the_reference(size):
    with torch.device("meta"):
        models = [WorldModel(WorldModelConfig(size=size), space(d), (k,)) for d, k in BODIES]
    assert tuple(sum(p.numel() for p in model.parameters()) for model in models) == COUNTS[size]


def test_critics_in_one_product_are_critics_one_by_one():
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


def test_a_critic_is_the_layers_that_the_reference_describes():
    critics, x = build().critics, noise(7, 18)
    torch.nn.init.normal_(critics[2].weight)
    hidden = x
    for layer in list(critics)[:2]:
        hidden = torch.nn.functional.linear(hidden, layer.weight[1], layer.bias[1])
        hidden = torch.nn.functional.layer_norm(hidden, (24,), layer.ln.weight[1], layer.ln.bias[1])
        hidden = torch.nn.functional.mish(hidden)
    plain = torch.nn.functional.linear(hidden, critics[2].weight[1], critics[2].bias[1])
    torch.testing.assert_close(critics(x)[1], plain, rtol=1e-4, atol=1e-5)


def test_nothing_is_expected_of_the_world_at_first():
    model = build()
    z = model.encode(noise(3, 4), None)
    joint = model.joint(z, noise(3, 2), None)
    assert not model.reward(joint).any()
    assert not model.critics(joint).any()
    assert model.q_value(model.critics, z, noise(3, 2), None, torch.tensor([0, 1])).abs().max() < 1e-5


def test_latents_are_points_of_simplices():
    model = build()
    z = model.encode(noise(3, 4), None)
    for latent in (z, model.dynamics(model.joint(z, noise(3, 2), None))):
        torch.testing.assert_close(latent.unflatten(-1, (2, 8)).sum(-1), torch.ones(3, 2))


def test_the_policys_entropy_is_that_of_its_noise_times_its_features():
    model, draws = build(), noise(6, 2)
    z = model.encode(noise(6, 4), None)
    acted = model.act(z, draws, None)
    mean, log_std = model.policy(z).chunk(2, -1)
    log_std = -10 + 6 * (log_std.tanh() + 1)
    normal = torch.distributions.Normal(mean, log_std.exp())
    drawn = mean + draws * log_std.exp()
    torch.testing.assert_close(acted.action, drawn.tanh())
    torch.testing.assert_close(acted.entropy, -2 * normal.log_prob(drawn).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_task_moves_only_the_features_that_it_has():
    model = build(actions=(1, 3))
    task = torch.tensor([0, 1])
    z, draws = model.encode(noise(2, 4), task), noise(2, 3)
    acted = model.act(z, draws, task)
    assert acted.action[0, 1:].tolist() == [0.0, 0.0]
    assert acted.action[1].all()
    draws[0, 1:] = 9.0
    torch.testing.assert_close(model.act(z, draws, task).entropy, acted.entropy)  # nor does their noise count


def test_vectors_of_tasks_are_shortened_all_at_once():
    model = build(actions=(1, 1, 1))
    model.task.weight.data[0] *= 1000
    before = model.task.weight.detach().clone()
    model.shorten_tasks()
    assert model.task.weight[0].norm().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(model.task.weight[1:], before[1:])


def test_pictures_become_latents_of_512():
    pictures = Box(0, 255, (9, 64, 64), np.uint8)
    model = WorldModel(TINY, pictures, (2,))
    z = model.encode(torch.randint(0, 256, (2, 3, 9, 64, 64), dtype=torch.uint8, generator=torch.Generator()), None)
    assert z.shape == (2, 3, 512)
    assert model.latent == 512


@pytest.mark.parametrize("wrong", [{"latent": 12}, {"num_q": 1}, {"width": 0}])
def test_shapes_that_cannot_be_are_refused_in_words(wrong):
    with pytest.raises(ConfigError, match="latent is a multiple of 8"):
        WorldModelConfig(size=1, **wrong).shape()


# ------------------------------------------------------------------------------------------------------- their layout


class Weights:
    """A model and its targets, as an algorithm names them."""

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
def test_weights_in_the_authors_layout_load_and_give_equal_outputs(options, older):
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
    tasks = torch.tensor([0, 1, 1]) if len(theirs.model.masks) > 1 else None
    obs, action = noise(3, 4), noise(3, theirs.model.actions)
    for net in (ours, theirs):
        net.z = net.model.encode(obs, tasks)
        joint = net.model.joint(net.z, action, tasks)
        net.outputs = [net.z, net.model.dynamics(joint), net.model.reward(joint), net.model.critics(joint)]
        net.outputs += [net.targets(joint), net.model.act(net.z, action, tasks).action]
    assert all(torch.equal(a, b) for a, b in zip(ours.outputs, theirs.outputs, strict=True))


def as_older(written):
    """Critics as they were once named: by number through all layers."""
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


def test_weights_of_something_else_are_refused_in_words():
    with pytest.raises(ValueError, match="no critics that are targets"):
        from_reference({"layer.weight": torch.zeros(2)})
