"""Custom activations match torch in values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.nn.activations import Tanh, mish, simplicial


def plain_simplicial(x):
    return x.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)


@pytest.mark.parametrize(("ours", "theirs"), [(mish, F.mish), (lambda x: simplicial(x, 8), plain_simplicial)])
def test_activation_values_and_gradients_match_torch(ours, theirs):
    draws = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 3, 32, generator=draws) * 6).requires_grad_()
    slope = torch.randn(7, 3, 32, generator=draws)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    mine, wanted = (torch.autograd.grad(f(x), x, slope)[0] for f in (ours, theirs))
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


def test_tanh_bfloat16_values_and_gradients_are_bit_identical_to_torch():
    draws = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 33, generator=draws) * 3).bfloat16().requires_grad_()
    slope = torch.randn(64, 33, generator=draws).bfloat16()
    assert torch.equal(Tanh()(x), torch.tanh(x))
    mine, wanted = (torch.autograd.grad(f(x), x, slope)[0] for f in (Tanh(), torch.tanh))
    assert torch.equal(mine, wanted)


def test_mish_of_large_inputs_is_identity_or_zero():
    far = torch.tensor([-1e4, -100.0, 0.0, 50.0, 1e4], requires_grad=True)
    torch.testing.assert_close(mish(far), torch.tensor([0.0, 0.0, 0.0, 50.0, 1e4]))
    torch.testing.assert_close(torch.autograd.grad(mish(far).sum(), far)[0], torch.tensor([0.0, 0.0, 0.6, 1.0, 1.0]))


def test_simplicial_groups_of_eight_sum_to_one():
    x = torch.zeros(2, 16)
    x[1, :8] = torch.tensor([3.0, 4.0]).log().repeat(4)  # alternating 3 and 4: 3/28 and 4/28
    x[1, 8] = 1e4
    points = simplicial(x, 8)
    assert points[0].tolist() == [0.125] * 16
    torch.testing.assert_close(points[1, :8], torch.tensor([3 / 28, 4 / 28]).repeat(4))
    assert points[1, 8:].tolist() == [1.0] + [0.0] * 7
