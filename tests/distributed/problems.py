"""Small networks and one fixed batch, partitioned into lanes, for the gradient tests.

Shapes: 8 lanes, N samples per lane.
"""

import hashlib
import time
from typing import ClassVar

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.distributed import DistributedOptimizer
from lockstep.protocols import Loss

LANES, N = 8, 6


class TwoHeads(nn.Module):
    """A trunk with two heads of equal size, of which a caller may use one, both, or both in the other order."""

    weight: ClassVar = {"left": 1.0, "right": -0.7}

    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x, heads=("left", "right")):
        x = self.trunk(x).tanh()
        outputs = [getattr(self, head)(x) * self.weight[head] for head in heads]
        # Backward visits the heads in reverse order; the pause lets the first gradient be sent before the others.
        return sum([Pause.apply(outputs[0]), *outputs[1:]])


class Pause(torch.autograd.Function):
    """Identity with a delay in backward."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.05)
        return gradient


def build(kind):
    """Build a network with the same initial weights on every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if kind == "conv":
            net = nn.Sequential(
                nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)
            )
            return net.to(memory_format=torch.channels_last)
        if kind == "mlp":
            return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
        return TwoHeads()


def everything(kind):
    """Return the global batch, [8, N, ...]."""
    draws = torch.Generator().manual_seed(7)
    shape = (2, 5, 5) if kind == "conv" else (5,)
    inputs = torch.randn(LANES, N, *shape, generator=draws)
    # Lanes differ a lot, so that a gradient without reduction is far off.
    inputs += torch.arange(LANES).view(-1, 1, *(1,) * len(shape)) / LANES
    return {"x": inputs, "y": torch.randn(LANES, N, 3, generator=draws)}


def hosted_here(batch, runtime):
    """Return this process's part of a global batch, [L x N, ...], lane after lane."""
    local = slice(runtime.lanes.local.start, runtime.lanes.local.stop)
    return {name: part[local].flatten(0, 1) for name, part in batch.items()}


def by_lane(batch, runtime):
    """Split the batch of this process into lanes, [L, N, ...]."""
    return {name: part.unflatten(0, (len(runtime.lanes), -1)) for name, part in batch.items()}


def squared_error(net, **options):
    """Return a loss function for the optimizer: the sum over samples and the sample count."""

    def loss(batch):
        error = (net(batch["x"], **options) - batch["y"]).square().sum()
        return Loss(loss_sum=error, num_samples=len(batch["x"]), metric_sums={"error": error.detach()})

    return loss


def plain_gradient(kind, batch=None, **options):
    """Return plain torch's gradient of the mean over the global batch, by parameter."""
    net, batch = build(kind), batch or everything(kind)
    flat = {name: part.flatten(0, 1) for name, part in batch.items()}
    (squared_error(net, **options)(flat).loss_sum / len(flat["x"])).backward()
    return gradients(net)


def gradients(net):
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def distance(ours, theirs):
    """Return the largest relative difference of any parameter's gradient."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def run_config(reduction="fast", **options):
    return RunConfig(**{"lanes": LANES, "reduction": reduction, "device": "cpu", "collective_timeout": 20.0} | options)


def optimizer_for(net, runtime, rate=0.1, kind=torch.optim.SGD, **options):
    return DistributedOptimizer(runtime, kind(net.named_parameters(), lr=rate, fused=True), **options)


def digest(tensors):
    """Return a hash of named tensors that changes with any bit."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return whole.hexdigest()
