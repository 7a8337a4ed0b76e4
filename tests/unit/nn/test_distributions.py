"""Action distributions match torch.distributions; sampling is a function of the given noise."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions, tensor

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.nn.distributions import Categorical, Gaussian, Mixed, MultiCategorical, make_distribution, mask_logits
from lockstep.ops import cpu_kernels, fused_losses

pairs = st.tuples(st.floats(-20, 20, width=32), st.floats(-3.5, 87.5, width=32))
"""A logit and a noise value in the float32 range of Gumbel noise."""
SIZES = [2, 3, 4]


def normal_of(outputs):
    mean, log_std = outputs.chunk(2, -1)
    return distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)


def judged(distribution, outputs, *arguments):
    """Return the results of `distribution` and the gradient of a fixed weighted sum of them."""
    outputs = outputs.clone().requires_grad_()
    found = distribution(outputs, *arguments)
    draw = torch.Generator().manual_seed(0)
    sum((part * torch.randn(part.shape, generator=draw)).sum() for part in found).backward()
    return [part.detach() for part in found], outputs.grad


def judged_by_torch(outputs, action):
    theirs = distributions.Categorical(logits=outputs)
    return theirs.log_prob(action), theirs.entropy()


# ---------------------------------------------------------------------------------------------------------- categorical


@given(st.integers(0, 2**32), st.integers(1, 7), st.floats(0.01, 10))
def test_categorical_log_prob_and_entropy_match_torch(seed, choices, scale):
    outputs = torch.randn(5, choices, generator=torch.Generator().manual_seed(seed)) * scale
    ours, theirs = Categorical(choices), distributions.Categorical(logits=outputs)
    for action in range(choices):
        chosen = torch.full((5,), action)
        log_prob, entropy = ours.log_prob_and_entropy(outputs, chosen)
        torch.testing.assert_close(log_prob, theirs.log_prob(chosen))
        torch.testing.assert_close(entropy, theirs.entropy(), atol=1e-5, rtol=1e-4)
    assert torch.equal(ours.mode(outputs), theirs.mode)


@given(st.integers(0, 2**32), st.integers(1, 7), st.floats(0.01, 10))
def test_categorical_gradient_matches_torch(seed, choices, scale):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, choices, generator=draw) * scale
    action = torch.randint(choices, (5,), generator=draw)
    _, ours = judged(Categorical(choices).log_prob_and_entropy, outputs, action)
    _, theirs = judged(judged_by_torch, outputs, action)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_categorical_sample_follows_given_noise():
    # A choice that is twice as likely leads by log 2; only larger noise changes the result.
    outputs, ahead = tensor([0.5, 0.25, 0.25]).log().expand(5, 3), math.log(2)
    noise = tensor([[0, 0, 0], [0, ahead - 0.01, 0], [0, ahead + 0.01, 0], [-ahead - 0.01, -0.1, 0], [1, 1, ahead + 2]])
    assert Categorical(3).sample(outputs, noise).tolist() == [0, 0, 1, 2, 2]


def test_categorical_sample_frequencies_match_probabilities():
    shares = tensor([0.1, 0.2, 0.3, 0.4])
    streams = Lanes(2, range(2), 0).streams("noise")
    noise = Categorical(4).sample_noise(streams, 0, 50_000)
    assert noise.shape == (2, 50_000, 4)
    found = Categorical(4).sample(shares.log().expand(100_000, 4), noise.flatten(0, 1))
    torch.testing.assert_close(found.bincount(minlength=4) / 100_000, shares, atol=0.006, rtol=0)


@given(st.lists(pairs, min_size=1, max_size=6))
def test_categorical_sample_with_extreme_noise_is_valid(drawn):
    outputs, noise = tensor([drawn]).unbind(-1)
    assert 0 <= Categorical(len(drawn)).sample(outputs, noise).item() < len(drawn)


def test_categorical_masked_choice_is_never_sampled():
    outputs = tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    noise = Categorical(4).sample_noise(Lanes(1, range(1), 0).streams("noise"), 0, 10_000).squeeze(0)
    assert set(Categorical(4).sample(outputs.expand(10_000, 4), noise).tolist()) == {1, 3}
    most, least = -math.log(torch.finfo(torch.float32).tiny), -math.log(104.0)  # bounds of the noise
    worst = tensor([[most, least, most, least - 0.1], [most, least - 0.1, most, least]])
    assert Categorical(4).sample(outputs.expand(2, 4), worst).tolist() == [1, 3]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 2.0**16])  # as with a loss scale
def test_categorical_masked_choices_do_not_affect_others(scale):
    draw = torch.Generator().manual_seed(0)
    allowed = torch.tensor([0, 2, 3])
    few = torch.randn(6, 3, generator=draw)
    outputs = torch.full((6, 5), -torch.inf).index_copy(1, allowed, few)
    place = torch.randint(3, (6,), generator=draw)

    def scaled(judge):
        return lambda *arguments: [part * scale for part in judge(*arguments)]

    ours, by_ours = judged(scaled(Categorical(5).log_prob_and_entropy), outputs, allowed[place])
    theirs, by_theirs = judged(scaled(judged_by_torch), few, place)
    torch.testing.assert_close(ours, theirs)
    assert by_ours.isfinite().all()
    assert not by_ours[:, [1, 4]].any()
    torch.testing.assert_close(by_ours[:, allowed], by_theirs, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("columns", [[8], [3, 5], [4, 4], [0, 3, 0, 5]])
def test_masked_actions_of_a_million_draws_are_all_legal(columns):
    """Random logits up to +-50 and random masks, with at least one legal choice of each action."""
    draw, count = torch.Generator().manual_seed(len(columns)), 250_000
    sizes = [size for size in columns if size]
    actions = Mixed(columns) if 0 in columns else MultiCategorical(sizes) if len(sizes) > 1 else Categorical(8)
    mask = torch.rand(count, 8, generator=draw) < 0.3
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    for start, size in zip(starts.tolist(), sizes, strict=True):
        sure = torch.randint(size, (count, 1), generator=draw)
        mask[:, start : start + size].scatter_(1, sure, True)
    outputs = torch.randn(count, actions.num_params + actions.num_free_params, generator=draw) * 15
    masked = mask_logits(outputs, mask.to(torch.uint8))
    noise = actions.sample_noise(Lanes(1, range(1), 0).streams("noise"), 0, count).squeeze(0)
    discrete = [place for place, size in enumerate(columns) if size]
    for action in (actions.sample(masked, noise), actions.mode(masked)):
        choices = action.view(count, -1)[:, discrete].long()
        assert mask.gather(1, choices + starts).all()
        assert actions.log_prob_and_entropy(masked, action)[0].isfinite().all()
    assert torch.equal(masked[:, 8:], outputs[:, 8:])


@pytest.mark.parametrize("path", ["cpu kernel", "fused", "textbook"])
@pytest.mark.parametrize("columns", [[5], [2, 3], [0, 2, 3]])
def test_gradient_through_mask_is_finite_and_zero_for_illegal_choices(monkeypatch, path, columns):
    monkeypatch.setattr(cpu_kernels, "is_supported", lambda *_: path == "cpu kernel")
    monkeypatch.setattr(fused_losses, "is_supported", lambda *_: path == "fused")
    actions = Mixed(columns) if 0 in columns else MultiCategorical(columns) if len(columns) > 1 else Categorical(5)
    mask = tensor([[1, 0, 0, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.uint8)
    outputs = torch.randn(3, actions.num_params + actions.num_free_params, generator=torch.Generator().manual_seed(0))
    outputs.requires_grad_()
    masked = mask_logits(outputs, mask)
    log_prob, entropy = actions.log_prob_and_entropy(masked, actions.mode(masked.detach()))
    (log_prob.sum() - 3 * entropy.sum()).backward()
    assert log_prob.isfinite().all()
    assert outputs.grad.isfinite().all()
    assert not outputs.grad[:, :5][mask == 0].any()
    assert outputs.grad[:, :5][mask == 1].any()
    legal = [part.log_softmax(0).tolist() for part in (outputs[2, :5].split([5] if columns == [5] else [2, 3]))]
    discrete_entropy = -sum(math.exp(x) * x for part in legal for x in part)
    gaussian_entropy = sum(outputs[2, 6:].tolist()) + 0.5 * math.log(2 * math.pi * math.e) * columns.count(0)
    assert entropy[2].item() == pytest.approx(discrete_entropy + gaussian_entropy, abs=1e-5)


def test_categorical_computes_in_float32_for_bfloat16_logits():
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    log_prob, entropy = Categorical(3).log_prob_and_entropy(outputs, torch.zeros(4))
    assert log_prob.dtype == entropy.dtype == torch.float32
    fine = tensor([0.0, 0.001])  # below the resolution of bfloat16 near 1
    assert Categorical(2).sample(torch.ones(1, 2).bfloat16(), fine.unsqueeze(0)).item() == 1


# ---------------------------------------------------------------------------------------------------- multi-categorical


@given(st.integers(0, 2**32))
def test_multi_categorical_equals_independent_categoricals(seed):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, sum(SIZES), generator=draw) * 3
    ours = MultiCategorical(SIZES)
    action = torch.stack([torch.randint(size, (5,), generator=draw) for size in SIZES], dim=-1)

    def judge_apart(outputs, action):
        theirs = [distributions.Categorical(logits=part) for part in outputs.split(SIZES, -1)]
        log_probs = [part.log_prob(action[:, place]) for place, part in enumerate(theirs)]
        return sum(log_probs), sum(part.entropy() for part in theirs)

    found, by_found = judged(ours.log_prob_and_entropy, outputs, action)
    wanted, by_wanted = judged(judge_apart, outputs, action)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(by_found, by_wanted, atol=1e-4, rtol=1e-4)
    modes = [part.argmax(-1) for part in outputs.split(SIZES, -1)]
    assert torch.equal(ours.mode(outputs), torch.stack(modes, dim=-1))


def test_multi_categorical_uses_separate_noise_per_choice():
    ours = MultiCategorical([2, 3])
    noise = tensor([[1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0]])
    assert ours.sample(torch.zeros(2, 5), noise).tolist() == [[0, 2], [1, 0]]
    streams = Lanes(3, range(3), 0).streams("noise")
    assert ours.sample_noise(streams, 0, 4, 6).shape == (3, 4, 6, 5)


# ----------------------------------------------------------------------------------------------------------- continuous


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_gaussian_log_prob_and_entropy_match_torch(seed, features):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, 2 * features, generator=draw)
    action = torch.randn(5, features, generator=draw) * 2
    ours, theirs = Gaussian(features), normal_of(outputs)
    log_prob, entropy = ours.log_prob_and_entropy(outputs, action)
    torch.testing.assert_close(log_prob, theirs.log_prob(action), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy, theirs.entropy())
    assert torch.equal(ours.mode(outputs), outputs[:, :features])


def test_gaussian_sample_follows_given_noise():
    outputs = tensor([[1.0, -1.0, 0.0, 2.0]])  # means 1 and -1, standard deviations 1 and e^2
    found = Gaussian(2).sample(outputs, tensor([[0.5, -1.0]]))
    torch.testing.assert_close(found, tensor([[1.5, -1.0 - 2.718281828**2]]))


def test_gaussian_noise_is_standard_normal_with_action_shape():
    noise = Gaussian(3).sample_noise(Lanes(2, range(2), 0).streams("noise"), 0, 4, 2500)
    assert noise.shape == (2, 4, 2500, 3)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)


# ---------------------------------------------------------------------------------------------------------------- mixed


def test_mixed_equals_independent_parts_in_any_order_of_columns():
    draw = torch.Generator().manual_seed(0)
    ours, outputs = Mixed([0, 3, 2, 0]), torch.randn(6, 5 + 2 + 2, generator=draw)
    noise = ours.sample_noise(Lanes(1, range(1), 0).streams("noise"), 3, 6).squeeze(0)
    discrete, gaussian = MultiCategorical([3, 2]), Gaussian(2)
    for action, choices, numbers in [
        (ours.mode(outputs), discrete.mode(outputs[:, :5]), gaussian.mode(outputs[:, 5:])),
        (
            ours.sample(outputs, noise),
            discrete.sample(outputs[:, :5], noise[:, :5]),
            gaussian.sample(outputs[:, 5:], noise[:, 5:]),
        ),
    ]:
        assert action.dtype == torch.float32
        assert torch.equal(action[:, [1, 2]].long(), choices)
        assert torch.equal(action[:, [0, 3]], numbers)
        found = ours.log_prob_and_entropy(outputs, action)
        parts = discrete.log_prob_and_entropy(outputs[:, :5], choices)
        parts = zip(parts, gaussian.log_prob_and_entropy(outputs[:, 5:], numbers), strict=True)
        assert all(torch.equal(one, a + b) for one, (a, b) in zip(found, parts, strict=True))


def test_mixed_noise_of_discrete_and_continuous_parts_is_independent():
    noise = Mixed([2, 0]).sample_noise(Lanes(1, range(1), 0).streams("noise"), 1, 20_000).squeeze(0)
    correlations = torch.corrcoef(noise.t())
    assert correlations.fill_diagonal_(0).abs().max() < 0.03


# --------------------------------------------------------------------------------------------------------------- spaces


@pytest.mark.parametrize(
    ("space", "kind", "outputs", "spread"),
    [
        (spaces.Discrete(4), Categorical, 4, 0),
        (spaces.MultiDiscrete([2, 3]), MultiCategorical, 5, 0),
        (spaces.Box(-1, 1, (3,), np.float32), Gaussian, 3, 3),
        (spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2, 2), np.float32)]), Mixed, 8, 4),
        (spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([2, 2])]), MultiCategorical, 8, 0),
        (spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32)}), Gaussian, 2, 2),
    ],
)
def test_make_distribution_returns_type_for_space(space, kind, outputs, spread):
    actions = make_distribution(space)
    assert (type(actions), actions.num_params, actions.num_free_params) == (kind, outputs, spread)


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.Box(-1, 1, (2, 2), np.float32), spaces.Text(3)])
def test_make_distribution_rejects_unsupported_space(space):
    with pytest.raises(ConfigError, match=r"are not supported.\nUse Discrete, MultiDiscrete, one-dimensional Box"):
        make_distribution(space)
