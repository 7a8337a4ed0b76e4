"""Squashed Gaussian: equal to torch's transformed distribution, finite at the bounds."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from lockstep.nn.squashed_gaussian import LOG_STD_RANGE, squashed_mode, squashed_sample


def test_squashed_sample_matches_transformed_distribution():
    torch.manual_seed(0)
    mean, log_std = torch.randn(64, 3, dtype=torch.float64), torch.randn(64, 3, dtype=torch.float64) / 2 - 0.5
    noise = torch.randn(64, 3, dtype=torch.float64)
    action, log_prob = squashed_sample(torch.cat([mean, log_std], 1), noise)
    normal = Normal(mean, log_std.exp())
    expected = TransformedDistribution(Independent(normal, 1), TanhTransform(cache_size=1))
    raw = mean + log_std.exp() * noise
    torch.testing.assert_close(action.double(), raw.tanh(), atol=1e-6, rtol=0)
    # From the value before tanh: its inverse is ill-conditioned near the bounds.
    reference = Independent(normal, 1).log_prob(raw) - TanhTransform().log_abs_det_jacobian(raw, raw.tanh()).sum(1)
    torch.testing.assert_close(log_prob.double(), reference, atol=1e-4, rtol=1e-4)
    inner = raw.abs().amax(1) < 2
    assert inner.sum() > 20
    torch.testing.assert_close(log_prob.double()[inner], expected.log_prob(raw.tanh())[inner], atol=1e-4, rtol=1e-4)


def test_squashed_sample_by_hand():
    # Mean 0, standard deviation 1, noise 0: density of the Gaussian, and a slope of tanh of 1.
    action, log_prob = squashed_sample(torch.zeros(1, 2), torch.zeros(1, 1))
    assert action.item() == 0.0
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi))
    # Noise 1: the slope is 1 - tanh(1)^2.
    action, log_prob = squashed_sample(torch.zeros(1, 2), torch.ones(1, 1))
    assert action.item() == pytest.approx(math.tanh(1.0))
    assert log_prob.item() == pytest.approx(
        -0.5 - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(1.0) ** 2), rel=1e-5
    )


@pytest.mark.parametrize(("mean", "log_std"), [(50.0, 0.0), (-50.0, 5.0), (0.0, -40.0), (0.0, 40.0)])
def test_log_prob_and_gradient_are_finite_at_the_bounds(mean, log_std):
    outputs = torch.tensor([[mean, log_std]], requires_grad=True)
    action, log_prob = squashed_sample(outputs, torch.ones(1, 1))
    (action.sum() + log_prob.sum()).backward()
    assert log_prob.isfinite().all()
    assert outputs.grad.isfinite().all()
    assert (outputs.grad[0, 1] == 0) == (not LOG_STD_RANGE[0] <= log_std <= LOG_STD_RANGE[1])  # clamped


def test_squashed_mode_is_the_tanh_of_the_mean():
    outputs = torch.tensor([[0.5, -0.3, 1.0, 2.0]])
    torch.testing.assert_close(squashed_mode(outputs), torch.tensor([[0.5, -0.3]]).tanh())
