"""Action distributions agree with torch's, and sampling follows the noise it is handed."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions, tensor

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.nets.actions import Categorical, Gaussian, MultiCategorical, build_actions

ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
logits = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=6)
SIZES = [2, 3, 4]


def normal_of(outputs):
    mean, log_std = outputs.chunk(2, -1)
    return distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)


# ----------------------------------------------------------------------------------------------------------- one choice


@given(st.integers(0, 2**32), st.integers(1, 7), st.floats(0.01, 10))
def test_a_choice_has_the_log_probability_and_entropy_of_torchs_own(seed, choices, scale):
    outputs = torch.randn(5, choices, generator=torch.Generator().manual_seed(seed)) * scale
    ours, theirs = Categorical(choices), distributions.Categorical(logits=outputs)
    for action in range(choices):
        chosen = torch.full((5,), action)
        torch.testing.assert_close(ours.log_prob(outputs, chosen), theirs.log_prob(chosen))
    torch.testing.assert_close(ours.entropy(outputs), theirs.entropy(), atol=1e-5, rtol=1e-4)
    assert torch.equal(ours.mode(outputs), theirs.mode)


def test_a_choice_follows_its_noise_as_worked_by_hand():
    outputs = tensor([0.5, 0.25, 0.25]).log().expand(7, 3)
    noise = tensor([0.0, 0.25, 0.4999, 0.5, 0.7499, 0.75, 0.9999])
    assert Categorical(3).sample(outputs, noise).tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_choices_come_as_often_as_their_probabilities_say():
    shares = tensor([0.1, 0.2, 0.3, 0.4])
    streams = Lanes(2, range(2), 0).streams("noise")
    noise = Categorical(4).noise(streams, 0, 50_000)
    assert noise.shape == (2, 50_000)
    found = Categorical(4).sample(shares.log().expand(100_000, 4), noise.flatten())
    torch.testing.assert_close(found.bincount(minlength=4) / 100_000, shares, atol=0.006, rtol=0)


@given(logits)
def test_a_choice_is_one_of_the_choices_even_where_noise_is_almost_one(values):
    # The cumulative sum may round to less than the largest noise there is.
    outputs = tensor([values])
    for noise in (0.0, ALMOST_ONE):
        assert 0 <= Categorical(len(values)).sample(outputs, tensor([noise])).item() < len(values)


def test_where_the_sum_rounds_to_less_than_the_noise_the_last_choice_is_taken():
    outputs = torch.randn(10_000, 4, generator=torch.Generator().manual_seed(0))
    short = outputs.softmax(-1).cumsum(-1)[:, -1] <= ALMOST_ONE
    assert short.any()  # the case above is no idle fear: without the clamp these would be choice 4 of 0 to 3
    assert (Categorical(4).sample(outputs[short], tensor(ALMOST_ONE).expand(int(short.sum()))) == 3).all()


def test_a_choice_that_cannot_be_is_not_taken():
    outputs = tensor([[-torch.inf, 0.0, -torch.inf, 0.0]]).expand(4, 4)
    assert Categorical(4).sample(outputs, tensor([0.0, 0.49, 0.51, 0.99])).tolist() == [1, 1, 3, 3]


def test_a_choice_is_computed_in_single_precision_whatever_the_network_ran_in():
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours = Categorical(3)
    assert ours.log_prob(outputs, torch.zeros(4)).dtype == ours.entropy(outputs).dtype == torch.float32


# ------------------------------------------------------------------------------------------------------ several choices


@given(st.integers(0, 2**32))
def test_several_choices_are_independent_ones(seed):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, sum(SIZES), generator=draw) * 3
    ours = MultiCategorical(SIZES)
    theirs = [distributions.Categorical(logits=part) for part in outputs.split(SIZES, -1)]
    action = torch.stack([torch.randint(size, (5,), generator=draw) for size in SIZES], dim=-1)
    wanted = sum(part.log_prob(action[:, place]) for place, part in enumerate(theirs))
    torch.testing.assert_close(ours.log_prob(outputs, action), wanted)
    torch.testing.assert_close(ours.entropy(outputs), sum(part.entropy() for part in theirs))
    assert torch.equal(ours.mode(outputs), torch.stack([part.mode for part in theirs], dim=-1))


def test_each_of_several_choices_has_its_own_noise():
    ours = MultiCategorical([2, 2])
    noise = tensor([[0.1, 0.9], [0.9, 0.1]])
    assert ours.sample(torch.zeros(2, 4), noise).tolist() == [[0, 1], [1, 0]]
    streams = Lanes(3, range(3), 0).streams("noise")
    assert ours.noise(streams, 0, 4, 5).shape == (3, 4, 5, 2)


# ----------------------------------------------------------------------------------------------------------- continuous


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_gaussian_has_the_log_probability_and_entropy_of_torchs_own(seed, features):
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, 2 * features, generator=draw)
    action = torch.randn(5, features, generator=draw) * 2
    ours, theirs = Gaussian(features), normal_of(outputs)
    torch.testing.assert_close(ours.log_prob(outputs, action), theirs.log_prob(action), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours.entropy(outputs), theirs.entropy())
    assert torch.equal(ours.mode(outputs), outputs[:, :features])


def test_a_gaussian_follows_its_noise_as_worked_by_hand():
    outputs = tensor([[1.0, -1.0, 0.0, 2.0]])  # means 1 and -1, deviations 1 and e^2
    found = Gaussian(2).sample(outputs, tensor([[0.5, -1.0]]))
    torch.testing.assert_close(found, tensor([[1.5, -1.0 - 2.718281828**2]]))


def test_gaussian_noise_is_normal_and_has_the_shape_of_the_actions():
    noise = Gaussian(3).noise(Lanes(2, range(2), 0).streams("noise"), 0, 4, 2500)
    assert noise.shape == (2, 4, 2500, 3)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.02)


# --------------------------------------------------------------------------------------------------------------- spaces


@pytest.mark.parametrize(
    ("space", "kind", "outputs", "spread"),
    [
        (spaces.Discrete(4), Categorical, 4, 0),
        (spaces.MultiDiscrete([2, 3]), MultiCategorical, 5, 0),
        (spaces.Box(-1, 1, (3,), np.float32), Gaussian, 3, 3),
    ],
)
def test_a_space_gets_the_distribution_that_fits_it(space, kind, outputs, spread):
    actions = build_actions(space)
    assert (type(actions), actions.outputs, actions.spread) == (kind, outputs, spread)


@pytest.mark.parametrize("space", [spaces.MultiBinary(3), spaces.Box(-1, 1, (2, 2), np.float32), spaces.Text(3)])
def test_a_space_nobody_acts_in_is_refused_in_words(space):
    with pytest.raises(ConfigError, match=r"are not supported.\nUse Discrete, MultiDiscrete or one-dimensional Box."):
        build_actions(space)
