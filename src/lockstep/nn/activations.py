"""Tanh, Mish, and simplices of neighbouring features: on a CPU faster than torch's own, elsewhere torch's own.

Torch computes Mish number by number there, a softmax over eight features in as many calls as there are groups, and
tanh of bf16 five times slower than of fp32. All are written here as a few passes over the whole tensor, with their own
gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return _Tanh.apply(x) if _here(x, torch.bfloat16) else torch.tanh(x)


class Tanh(nn.Tanh):
    """The same as a layer."""

    def forward(self, input: Tensor) -> Tensor:
        return tanh(input)


def mish(x: Tensor) -> Tensor:
    """x tanh(log(1 + e^x))."""
    return _Mish.apply(x) if _here(x) else F.mish(x)


def simplicial(x: Tensor, group: int) -> Tensor:
    """A softmax over every `group` neighbouring features: each group becomes a point of a simplex."""
    if _here(x):
        return _Simplicial.apply(x, group)
    return x.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)


def _here(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    return x.device.type == "cpu" and x.dtype == dtype and not torch.compiler.is_compiling()


class _Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.float().tanh_().to(x.dtype)  # the same bits as torch's own
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(slopes[0], *ctx.saved_tensors)


class _Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        power = x.clamp(max=20.0).exp_()  # from there on Mish is x itself
        part = power.mul_(power + 2.0)
        part.div_(part + 2.0)  # tanh(log(1 + e^x))
        ctx.save_for_backward(x, part)
        return x * part

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        x, part = ctx.saved_tensors
        slope = x.sigmoid().mul_(x).mul_(1.0 - part.square())
        return slope.add_(part).mul_(slopes[0])


class _Simplicial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        parts = x.reshape(-1, group)
        power = (parts - parts.amax(1, keepdim=True)).exp_()
        power.div_(_sums(power))
        ctx.save_for_backward(power)
        return power.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (power,) = ctx.saved_tensors
        slope = slopes[0].reshape(power.shape)
        return (slope - _sums(slope * power)).mul_(power).view(slopes[0].shape), None


def _sums(parts: Tensor) -> Tensor:
    """The sum of each row, as often as the row is long: a product, because a sum over so few is slow."""
    return parts @ parts.new_ones(parts.shape[1], parts.shape[1])
