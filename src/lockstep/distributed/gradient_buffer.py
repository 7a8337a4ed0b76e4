"""Gradients in one flat buffer, and their all-reduce over lanes and processes.

In fast mode, buckets of the buffer are all-reduced while backward still runs. In exact mode, lanes are summed as
integers, so the result does not depend on the order.

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
    """Gradient of a list of parameters as one flat buffer, summed over the whole run."""

    def __init__(self, parameters: list[Parameter], runtime: Runtime) -> None:
        self.runtime = runtime
        # Reversed, because backward computes the gradients of the last layers first.
        self.parameters = parameters[::-1]
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size, device=parameters[0].device)  # [P]
        self._lanes = torch.zeros(len(runtime.lanes), size, device=self.flat.device) if runtime.exact else None
        self._bounds: list[tuple[int, int]] = []
        self._bucket_of: dict[Parameter, int] = {}
        self._members: list[list[Parameter]] = []
        """The parameters of each bucket."""
        self._missing: list[int] = []
        """How many parameters each bucket still waits for."""
        self._in_flight: list[tuple[Handle, Tensor]] = []
        self._overlapping = False
        # With hooks, each gradient is copied from backward's own tensor into the buffer. That moves half as much memory
        # as clearing the buffer and accumulating into it.
        self._uses_hooks = runtime.size > 1 and not runtime.exact
        # On a GPU, one copy per parameter would be one launch per parameter, so gradients are copied per bucket.
        self._by_bucket = self.flat.device.type != "cpu" and not runtime.exact
        self._written: list[bool] = []
        """Whether each bucket holds the gradient of an earlier micro-batch, to which the next is added."""
        self._views: dict[Parameter, Tensor] = {}
        """View of the buffer for the gradient of each parameter."""
        self._lay_out()

    def _lay_out(self) -> None:
        """Assign a view to every parameter and bounds to every bucket. The layout is the same on every process."""
        start = offset = 0
        for parameter in self.parameters:
            view = self.flat.as_strided(parameter.shape, parameter.stride(), offset)
            parameter.grad = self._views[parameter] = view
            if self._uses_hooks:
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

    def clear(self) -> None:
        """Reset the gradient to zero."""
        if self._uses_hooks or self._by_bucket:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.flat.zero_()
        self._written = [False] * len(self._bounds)
        if self._lanes is not None:
            self._lanes.zero_()
        self._in_flight = []
        self._missing = [len(members) for members in self._members]

    def backward(self, total: Tensor, lane: int, last: bool) -> None:
        """Add the gradient of one micro-batch or lane. During the `last` one, all-reduce filled buckets."""
        if total.requires_grad:
            self._overlapping = last
            # `inputs` excludes the parameters of other optimizers, such as those of the critic in an actor loss.
            torch.autograd.backward(total, inputs=self.parameters)
            self._overlapping = False
        if self._by_bucket:
            for bucket in range(len(self._in_flight), len(self._bounds)):
                self._gather(bucket)
        if self._lanes is not None:
            self._lanes[lane] += self.flat
            self.flat.zero_()

    def wait(self) -> None:
        """Wait until `flat` holds the sum over the whole run. NaN on any process makes the sum NaN on all of them."""
        if self._lanes is not None:
            self._sum_integers(self._lanes)
        else:
            # Parameters without a gradient (an unused head, a loss without gradient) contribute zeros.
            self.zero_missing()
            while len(self._in_flight) < len(self._bounds):
                self._launch_next()
            for (handle, bucket), (start, stop) in zip(self._in_flight, self._bounds, strict=True):
                handle.wait()
                if bucket.dtype != self.flat.dtype:
                    self.flat[start:stop] = bucket

    def reduce(self) -> None:
        """All-reduce all buckets and wait. For gradients that were not reduced during backward, as in a CUDA graph."""
        self._in_flight = []
        self.wait()

    def zero_missing(self) -> None:
        """Make every parameter's gradient a view of the buffer; zero those without a gradient."""
        for parameter, view in self._views.items():
            if parameter.grad is not view:
                if not self._by_bucket or not self._written[self._bucket_of[parameter]]:
                    view.zero_()
                parameter.grad = view

    def _gather(self, bucket: int) -> None:
        """Copy or add the gradients of a bucket into the buffer, in one or two launches."""
        members = self._members[bucket]
        with_grad = [parameter for parameter in members if parameter.grad is not None]
        views, grads = [self._views[p] for p in with_grad], [p.grad for p in with_grad if p.grad is not None]
        if not self._written[bucket]:
            missing = [self._views[p] for p in members if p.grad is None]
            if missing:
                torch._foreach_zero_(missing)
            if with_grad:
                torch._foreach_copy_(views, grads)
        elif with_grad:
            torch._foreach_add_(views, grads)
        self._written[bucket] = True
        for parameter in with_grad:
            parameter.grad = None

    def _grad_hook(self, parameter: Tensor) -> None:
        if not self._by_bucket:
            view = self._views[parameter]  # type: ignore[index]
            if parameter.grad is not view:
                view.copy_(parameter.grad)  # type: ignore[arg-type]
                parameter.grad = view
        if not self._overlapping:
            return  # later micro-batches will add to this gradient
        self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index]
        # Launch buckets in a fixed order; otherwise equally sized buckets could be reduced against each other silently.
        while len(self._in_flight) < len(self._bounds) and not self._missing[len(self._in_flight)]:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._overlapping and self._by_bucket:
            self._gather(len(self._in_flight))
        start, stop = self._bounds[len(self._in_flight)]
        bucket = self.flat[start:stop]
        if self.runtime.grad_comm_dtype is not None:
            # On one process, too, so that results do not depend on the number of processes.
            bucket = bucket.to(self.runtime.grad_comm_dtype)
        self._in_flight.append((self.runtime._start_sum("gradient", bucket), bucket))

    def _sum_integers(self, lanes: Tensor) -> None:
        """Sum the lanes as 64-bit integers. Without rounding, the bits are the same on any number of processes."""
        # Everything stays on the GPU, so the host does not wait. MPS has no float64: use the CPU there.
        if not has_float64(lanes.device):
            lanes = lanes.cpu()
        # Largest magnitude over all lanes, and a flag for non-finite values, because a MAX reduction may lose a NaN.
        largest = torch.linalg.vector_norm(lanes, torch.inf)
        finite = largest.isfinite()
        extremes = torch.stack([torch.where(finite, largest, 0.0).double(), (~finite).double()])
        largest_of_all, bad = self.runtime.all_reduce_max(extremes).unbind()
        # Scale so that the sum of all lanes fits into 62 bits.
        headroom = math.ceil(math.log2(self.runtime.lanes.num_lanes)) + 1
        scale = _power_of_two(62 - headroom - torch.frexp(largest_of_all).exponent.long())
        total = torch.zeros(lanes.shape[1], dtype=torch.int64, device=lanes.device)
        for chunk, lane_chunk in zip(total.split(_CHUNK), lanes.split(_CHUNK, dim=1), strict=True):
            torch.sum((lane_chunk.double() * scale).to(torch.int64), dim=0, out=chunk)
        self.runtime.all_reduce_sum(total)
        self.flat.copy_(torch.where(bad > 0, torch.nan, total.double() / scale))


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 ** exponent as float64, built from its bits because `pow` may round."""
    return (exponent + 1023 << 52).view(torch.float64)


_CHUNK = 2**15
"""Columns converted to integers at a time. They fit the cache."""
