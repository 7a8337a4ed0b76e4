"""Gradient: the gradient of some parameters in one flat buffer, and its reduction over lanes and processes.

In fast mode the buffer is summed in buckets that leave while backward still runs; in exact mode lanes are summed as
integers, which no order can change.

Shapes: P parameters in one flat buffer, L local lanes.
"""

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.distributed.collectives import Handle
from lockstep.distributed.runtime import Runtime
from lockstep.transfer import has_float64


class GradientBuffer:
    """The gradient of some parameters as one flat buffer, summed over the whole run."""

    def __init__(self, parameters: list[Parameter], runtime: Runtime) -> None:
        self.runtime = runtime
        # Reversed, because backward makes the last layers' gradients first.
        self.parameters = parameters[::-1]
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size, device=parameters[0].device)  # [P]
        self._lanes = torch.zeros(len(runtime.lanes), size, device=self.flat.device) if runtime.exact else None
        self._bounds: list[tuple[int, int]] = []
        self._bucket_of: dict[Parameter, int] = {}
        self._members: list[list[Parameter]] = []
        """The parameters of each bucket."""
        self._expected: list[int] = []
        """How many parameters each bucket waits for."""
        self._missing: list[int] = []
        self._in_flight: list[tuple[Handle, Tensor]] = []
        self._overlapping = False
        # Where hooks run anyway, backward hands over what it has and it is copied into the buffer: that moves half as
        # much memory as clearing the buffer and adding to it.
        self._handed_over = runtime.size > 1 and not runtime.exact
        # On a GPU a copy for each parameter is a launch for each: there, gradients are copied a bucket at a time.
        self._by_bucket = self.flat.device.type != "cpu" and not runtime.exact
        self._written: list[bool] = []
        """Whether a bucket holds a gradient of an earlier micro-batch, to which the next is added."""
        self._views: dict[Parameter, Tensor] = {}
        """Where in the buffer each parameter's gradient is."""
        self._lay_out()

    def _lay_out(self) -> None:
        """Give every parameter its place, and every bucket its bounds; the same on every process."""
        start = offset = 0
        for parameter in self.parameters:
            place = self.flat.as_strided(parameter.shape, parameter.stride(), offset)
            parameter.grad = self._views[parameter] = place
            if self._handed_over:
                parameter.register_post_accumulate_grad_hook(self._grad_hook)
            self._bucket_of[parameter] = len(self._bounds)
            offset += parameter.numel()
            if (offset - start) * self.flat.element_size() >= self.runtime.bucket_bytes:
                self._bounds.append((start, offset))
                start = offset
        if self._bucket_of[parameter] == len(self._bounds):  # the last bucket is still open
            self._bounds.append((start, offset))
        self._members = [[] for _ in self._bounds]
        for parameter, number in self._bucket_of.items():
            self._members[number].append(parameter)
        self._expected = [len(members) for members in self._members]

    def clear(self) -> None:
        """Start anew, at zero."""
        if self._handed_over or self._by_bucket:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.flat.zero_()
        self._written = [False] * len(self._bounds)
        if self._lanes is not None:
            self._lanes.zero_()
        self._in_flight = []
        self._missing = self._expected.copy()

    def backward(self, total: Tensor, lane: int, last: bool) -> None:
        """Add the gradient of one part's loss; with the last one, buckets leave as soon as backward has filled them."""
        if total.requires_grad:
            self._overlapping = last
            # `inputs` keeps the gradient off everybody else's parameters, such as a critic's in an actor's loss.
            torch.autograd.backward(total, inputs=self.parameters)
            self._overlapping = False
        if self._by_bucket:
            for bucket in range(len(self._in_flight), len(self._bounds)):
                self._gather(bucket)
        if self._lanes is not None:
            self._lanes[lane] += self.flat
            self.flat.zero_()

    def wait(self) -> None:
        """Wait until `flat` holds the sum over the whole run; not a number anywhere if it was not one somewhere."""
        if self._lanes is not None:
            self._sum_integers(self._lanes)
        else:
            # What backward did not fill (a head unused here, a loss that touches nothing) is zero, and joins now.
            self.zero_missing()
            while len(self._in_flight) < len(self._bounds):
                self._launch_next()
            for (handle, bucket), (start, stop) in zip(self._in_flight, self._bounds, strict=True):
                handle.wait()
                if bucket.dtype != self.flat.dtype:
                    self.flat[start:stop] = bucket

    def reduce(self) -> None:
        """The same for a gradient of which nothing left during backward, as when a graph filled it."""
        self._in_flight = []
        self.wait()

    def zero_missing(self) -> None:
        """See that every parameter has its gradient in the buffer, zero if it has none."""
        for parameter, place in self._views.items():
            if parameter.grad is not place:
                if not self._by_bucket or not self._written[self._bucket_of[parameter]]:
                    place.zero_()
                parameter.grad = place

    def _gather(self, bucket: int) -> None:
        """Bring what backward made of a bucket into the buffer, in one launch or two."""
        members = self._members[bucket]
        made = [parameter for parameter in members if parameter.grad is not None]
        views, grads = [self._views[p] for p in made], [p.grad for p in made if p.grad is not None]
        if not self._written[bucket]:
            missing = [self._views[p] for p in members if p.grad is None]
            if missing:
                torch._foreach_zero_(missing)
            if made:
                torch._foreach_copy_(views, grads)
        elif made:
            torch._foreach_add_(views, grads)
        self._written[bucket] = True
        for parameter in made:
            parameter.grad = None

    def _grad_hook(self, parameter: Tensor) -> None:
        if not self._by_bucket:
            place = self._views[parameter]  # type: ignore[index]
            if parameter.grad is not place:
                place.copy_(parameter.grad)  # type: ignore[arg-type]
                parameter.grad = place
        if not self._overlapping:
            return  # an earlier micro-batch: what it brought is not yet all of it
        self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index]
        # In one fixed order on every process: two buckets of equal size would else be summed crosswise without a word.
        while len(self._in_flight) < len(self._bounds) and not self._missing[len(self._in_flight)]:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._overlapping and self._by_bucket:
            self._gather(len(self._in_flight))
        start, stop = self._bounds[len(self._in_flight)]
        bucket = self.flat[start:stop]
        if self.runtime.grad_comm_dtype is not None:
            bucket = bucket.to(self.runtime.grad_comm_dtype)  # on one process, too: how many there are decides nothing
        self._in_flight.append((self.runtime._start_sum("gradient", bucket), bucket))

    def _sum_integers(self, lanes: Tensor) -> None:
        """Sum the lanes as 64-bit integers: no rounding, so no order, so the same bits on any number of processes."""
        # NaN and infinity both make the largest number bad. A flag beside it, because a MAX reduction may lose a NaN.
        # All of it stays on a GPU, which need not be waited for. MPS has no float64: there the CPU does it.
        if not has_float64(lanes.device):
            lanes = lanes.cpu()
        largest = torch.linalg.vector_norm(lanes, torch.inf)
        finite = largest.isfinite()
        extremes = torch.stack([torch.where(finite, largest, 0.0).double(), (~finite).double()])
        largest_of_all, bad = self.runtime.all_reduce_max(extremes).unbind()
        headroom = math.ceil(math.log2(self.runtime.lanes.num_lanes)) + 1
        scale = _power_of_two(62 - headroom - torch.frexp(largest_of_all).exponent.long())
        total = torch.zeros(lanes.shape[1], dtype=torch.int64, device=lanes.device)
        for chunk, of_lanes in zip(total.split(_CHUNK), lanes.split(_CHUNK, dim=1), strict=True):
            torch.sum((of_lanes.double() * scale).to(torch.int64), dim=0, out=chunk)
        self.runtime.all_reduce_sum(total)
        self.flat.copy_(torch.where(bad > 0, torch.nan, total.double() / scale))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 to some integers, as doubles with exactly that value: made of their bits, because `pow` may round."""
    return (exponent + 1023 << 52).view(torch.float64)


_CHUNK = 2**15
"""Columns converted to integers at a time, so that they stay in the cache."""
