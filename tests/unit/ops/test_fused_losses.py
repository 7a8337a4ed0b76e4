"""Fused losses match the reference formulas in values and gradients."""

import math

import pytest
import torch
from torch.distributions import Categorical, Normal

from lockstep.ops import fused_losses
from lockstep.ops.functional import ppo_loss

N = 257


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(outputs, inputs, weights):
    """Gradients of a weighted sum of outputs with respect to inputs."""
    total = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("ruled_out", [False, True])
def test_categorical_log_prob_and_entropy_match_torch(ruled_out):
    logits = draw(N, 5, scale=2.0)
    if ruled_out:
        logits[::3, 1] = -torch.inf
    logits.requires_grad_()
    action = torch.where(torch.arange(N) % 5 == 1, 0, torch.arange(N) % 5)
    weights = draw(N, seed=1), draw(N, seed=2)
    ours = fused_losses.FusedCategorical.apply(logits, action)
    logs = logits.log_softmax(-1)
    shares = logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)
    theirs = logs.gather(-1, action.unsqueeze(-1)).squeeze(-1), -shares.sum(-1)
    if not ruled_out:
        torch.testing.assert_close(theirs[1], Categorical(logits=logits).entropy())
    torch.testing.assert_close(ours, theirs)
    (mine,), (expected,) = gradients(ours, [logits], weights), gradients(theirs, [logits], weights)
    torch.testing.assert_close(mine, expected)
    assert mine.isfinite().all()


def test_gaussian_log_prob_and_entropy_match_torch():
    outputs, action = draw(N, 6).requires_grad_(), draw(N, 3, seed=1)
    weights = draw(N, seed=2), draw(N, seed=3)
    mean, log_std = outputs.chunk(2, -1)
    normal = Normal(mean, log_std.exp())
    ours, theirs = (
        fused_losses.FusedGaussian.apply(outputs, action),
        (normal.log_prob(action).sum(-1), normal.entropy().sum(-1)),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (mine,), (expected,) = gradients(ours, [outputs], weights), gradients(theirs, [outputs], weights)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value_clip", [None, 0.2])
@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_ppo_loss_matches_reference_formula(value_clip, scale):
    leaves = [draw(N, seed=seed, scale=0.3).requires_grad_() for seed in (1, 2, 3)]
    data = tuple(draw(N, seed=seed, scale=0.3) for seed in (4, 5, 6, 7))
    wide = [x.detach().double().requires_grad_() for x in leaves]  # float64 uses the reference formula
    theirs = ppo_loss(
        *wide, *(x.double() for x in data), clip=0.2, value_clip=value_clip, value_weight=0.5, entropy_weight=0.01
    )
    total, sums = fused_losses.FusedPPOLoss.apply(*leaves, data, (0.2, value_clip, 0.5, 0.01))
    torch.testing.assert_close(total.double(), theirs.total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), torch.stack([x.double() for x in theirs[1:]]), rtol=1e-5, atol=1e-4)
    mine = torch.autograd.grad(total * scale, leaves)
    expected = torch.autograd.grad(theirs.total * scale, wide)
    for x, y in zip(mine, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", range(7))
def test_ppo_loss_with_nan_input_is_nan(place):
    tensors = [draw(N, seed=seed, scale=0.3) for seed in range(7)]
    tensors[place][3] = math.nan
    leaves = [x.requires_grad_() for x in tensors[:3]]
    total, _ = fused_losses.FusedPPOLoss.apply(*leaves, tuple(tensors[3:]), (0.2, 0.2, 0.5, 0.01))
    assert total.isnan()


def test_is_supported_only_for_float32_on_other_devices():
    assert not fused_losses.is_supported(torch.zeros(3))
    assert fused_losses.is_supported(torch.zeros(3, device="meta"))
    assert not fused_losses.is_supported(torch.zeros(3, device="meta", dtype=torch.float64))
