"""Small networks and one fixed batch to learn from, dealt to lanes; what all the tests of gradients stand on.

Shapes: 8 lanes, N samples a lane.
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
        # Backward meets the heads in the opposite order; the pause lets the first one's gradient travel ahead.
        return sum([Pause.apply(outputs[0]), *outputs[1:]])


class Pause(torch.autograd.Function):
    """Does nothing, and takes its time for it in backward."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.05)
        return gradient


def build(kind):
    """A network that starts the same everywhere."""
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
    """The batch of the whole run, [8, N, ...]."""
    draws = torch.Generator().manual_seed(7)
    shape = (2, 5, 5) if kind == "conv" else (5,)
    inputs = torch.randn(LANES, N, *shape, generator=draws)
    # Lanes differ much, so that a process that learns from its own alone is far off.
    inputs += torch.arange(LANES).view(-1, 1, *(1,) * len(shape)) / LANES
    return {"x": inputs, "y": torch.randn(LANES, N, 3, generator=draws)}


def hosted_here(batch, runtime):
    """The part of a whole batch that falls on this process, [L x N, ...], lane after lane."""
    local = slice(runtime.lanes.local.start, runtime.lanes.local.stop)
    return {name: part[local].flatten(0, 1) for name, part in batch.items()}


def by_lane(batch, runtime):
    """The same with an axis for lanes, [L, N, ...]."""
    return {name: part.unflatten(0, (len(runtime.lanes), -1)) for name, part in batch.items()}


def squared_error(net, **options):
    """A loss function for the optimizer: a sum over samples, and how many there are."""

    def loss(batch):
        error = (net(batch["x"], **options) - batch["y"]).square().sum()
        return Loss(loss_sum=error, num_samples=len(batch["x"]), metric_sums={"error": error.detach()})

    return loss


def plain_gradient(kind, batch=None, **options):
    """What plain torch finds on one process for the mean over the whole batch, by parameter."""
    net, batch = build(kind), batch or everything(kind)
    flat = {name: part.flatten(0, 1) for name, part in batch.items()}
    (squared_error(net, **options)(flat).loss_sum / len(flat["x"])).backward()
    return gradients(net)


def gradients(net):
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters()}


def distance(ours, theirs):
    """The largest difference of any parameter's gradient, relative to that parameter's gradient."""
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def run_config(reduction="fast", **options):
    return RunConfig(**{"lanes": LANES, "reduction": reduction, "device": "cpu", "collective_timeout": 20.0} | options)


def optimizer_for(net, runtime, rate=0.1, kind=torch.optim.SGD, **options):
    return DistributedOptimizer(runtime, kind(net.named_parameters(), lr=rate, fused=True), **options)


def digest(tensors):
    """One text that changes with any bit of some named tensors."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(name.encode() + tensors[name].detach().contiguous().numpy().tobytes())
    return whole.hexdigest()
