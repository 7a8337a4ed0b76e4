"""The optimizer on one process: what it makes of its parameters before anything is reduced."""

import pytest
import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.protocols import Loss
from lockstep.runtime import Optimizer, Runtime


class OddNet(nn.Module):
    """A channels-last convolution, and parameters without elements at both ends."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(0))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.last = nn.Parameter(torch.zeros(0, 4))

    def loss(self, batch):
        return Loss(self.conv(batch["x"]).square().sum(), len(batch["x"]))


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_gradients_lie_in_one_buffer_whatever_the_strides_and_sizes_of_parameters(reduction, bucket_bytes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, batch = OddNet(), {"x": torch.randn(8, 5, 2, 4, 4)}
    expected = torch.autograd.grad(net.loss({"x": batch["x"].flatten(0, 1)}).total / 40, net.conv.weight)[0]
    runtime = Runtime.alone(RunConfig(reduction=reduction))
    inner = torch.optim.SGD(net.named_parameters(), lr=0.1)
    optimizer = Optimizer(runtime, inner, bucket_bytes=bucket_bytes)
    before = net.conv.weight.detach().clone()
    optimizer.step(net.loss, batch)
    assert len(optimizer.gradient.flat) == sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(before - 0.1 * expected, net.conv.weight.detach())
