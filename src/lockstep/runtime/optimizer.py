"""Optimizer: the only way a parameter changes.

A loss comes in as a sum and a count; out of `step` comes an update made from the gradient of the whole run: backward on
the local lanes, one reduction, division by the global count, clipping, the torch optimizer's step.

Shapes: P parameters in one flat buffer, L local lanes, N samples a lane.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.lanes import deal
from lockstep.protocols import LossFunction, Metrics, State
from lockstep.runtime.runtime import Runtime
from lockstep.trees import Tree, copy_into, first_leaf, tree_map

BUCKET_BYTES = 4 * 2**20
"""Gradients are reduced in buckets of about this size while backward still runs."""


class Optimizer:
    """A torch optimizer whose every step is taken by all processes together."""

    def __init__(
        self,
        runtime: Runtime,
        torch_optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`torch_optimizer` must be made from named parameters: `torch.optim.Adam(net.named_parameters())`."""
        self.runtime = runtime
        self.max_grad_norm = max_grad_norm
        self.accumulate = accumulate
        self.updates = torch.zeros((), dtype=torch.int64)
        self._inner = torch_optimizer
        self._base_rates = [group["lr"] for group in torch_optimizer.param_groups]
        groups = torch_optimizer.param_groups
        self._names = {p: n for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
        self.gradient = Gradient(list(self._names), runtime, bucket_bytes)
        self._loss_scale = LossScale(enabled=runtime.half == torch.float16)
        self._create_state()

    def step(self, loss: LossFunction, batch: Tree, learning_rate: float | None = None) -> Metrics:
        """Take one step on a batch [L, N, ...] of the local lanes; the metrics returned are those of the whole run.

        `loss` gets parts of the batch without a lane axis and returns sums over samples. The batches of all processes
        together are the batch of the step.
        """
        # A table row for each lane: the count, the loss and the other sums. It tells the global count, by which
        # the gradient is divided once, here, and nowhere else.
        scale = self._loss_scale.factor(first_leaf(batch).shape[1] * self.runtime.lanes.count)
        rows, names = self._backward(loss, batch, scale)
        with self.runtime.phase("reduce"):
            finite = self.gradient.finish()
        sums = rows.sum(0)
        self.updates += 1
        denominator = sums[0].clamp(min=1) * scale
        norm = self.gradient.flat.norm() / denominator
        finite = finite and bool(torch.isfinite(norm))
        self._loss_scale.update(finite)
        if finite:
            shrink = 1.0 if self.max_grad_norm is None else (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            self.gradient.flat.mul_(shrink / denominator)
            self._set_rates(learning_rate)
            self._inner.step()
        elif not self._loss_scale.enabled and self.runtime.nonfinite == "stop":
            raise FloatingPointError(self._describe(rows))
        metrics = Metrics()
        if not finite:
            sums = torch.zeros_like(sums)  # a step that was not taken counts for nothing
        for column, name in enumerate(names, start=1):
            metrics.agree(name, sums[column], sums[0])
        taken = torch.tensor(float(finite))
        metrics.agree("grad_norm", norm if finite else taken, taken)
        metrics.agree("skipped", 1.0 - taken, torch.ones(()))
        return metrics

    def state(self, prefix: str = "optimizer") -> State:
        """The live tensors of the optimizer by name."""
        state = {f"{prefix}.updates": self.updates}
        if self._loss_scale.enabled:
            state |= {
                f"{prefix}.loss_scale": self._loss_scale.value,
                f"{prefix}.good_steps": self._loss_scale.good_steps,
            }
        for parameter, slots in self._inner.state.items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    state[f"{prefix}.{self._names[parameter]}.{slot}"] = value
        return state

    def load_state(self, state: State, prefix: str = "optimizer") -> None:
        copy_into(self.state(prefix), state, prefix)

    def _backward(self, loss: LossFunction, batch: Tree, scale: Tensor) -> tuple[Tensor, list[str]]:
        """Fill the gradient from all micro-batches; return the pooled table [lanes, 2 + sums] and its columns."""
        runtime, gradient = self.runtime, self.gradient
        gradient.clear()
        pieces = _split(batch, self.accumulate)
        table: list[Tensor] = []
        names: list[str] = []
        wait: Callable[[], Tensor] | None = None
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            for lane, part in enumerate(runtime.by_lane(piece)):
                with runtime.autocast():
                    result = loss(part)
                names = ["loss", *result.sums]
                row = torch.stack(
                    [_scalar(x, result.total) for x in (result.samples, result.total, *result.sums.values())]
                )
                if number == 0:
                    table.append(row)
                else:
                    table[lane] = table[lane] + row
                if last and not runtime.exact:
                    # Launched before backward, so that it travels while backward runs, and first on every process.
                    wait = self._start_pooling(table)
                gradient.add(result.total, scale, lane, overlap=last and not runtime.exact)
        return (wait or self._start_pooling(table))(), names

    def _start_pooling(self, table: list[Tensor]) -> Callable[[], Tensor]:
        rows = torch.zeros(len(self.runtime.lanes), len(table[0]), dtype=torch.float64, device=table[0].device)
        rows[: len(table)] = torch.stack(table)  # fast mode fills one row for all local lanes
        return self.runtime._start_pooling(rows)

    def _set_rates(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            # Groups keep their proportions: the first group's rate is the one the caller names.
            for group, base in zip(self._inner.param_groups, self._base_rates, strict=True):
                group["lr"] = learning_rate * base / self._base_rates[0]

    def _create_state(self) -> None:
        """Make torch create the state now, so that it can be saved, restored and compared from the start."""
        self.gradient.clear()
        self._set_rates(0.0)
        self._inner.step()
        for slots in self._inner.state.values():
            for value in slots.values():
                if isinstance(value, Tensor):
                    value.zero_()
        for group, base in zip(self._inner.param_groups, self._base_rates, strict=True):
            group["lr"] = base

    def _describe(self, rows: Tensor) -> str:
        shares = deal(self.runtime.lanes.count, self.runtime.lanes.count if self.runtime.exact else self.runtime.size)
        # In fast mode a process sees all its lanes at once, and its sums stand in the row of the first.
        bad = [share for share in shares if not math.isfinite(rows[share.start, 1])]
        names = [f"lane {x.start}" if len(x) == 1 else f"one of lanes {x.start} to {x.stop - 1}" for x in bad]
        where = f"the loss is not finite on {', '.join(names)}" if names else "the loss is finite, its gradient is not"
        return (
            f"the gradient of update {int(self.updates)} is not finite: {where}.\n"
            "Lower the learning rate or the clipping norm, or use --run.nonfinite skip to leave such updates out."
        )


class Gradient:
    """The gradient of some parameters as one flat buffer, and its reduction over lanes and processes."""

    def __init__(self, parameters: list[Parameter], runtime: Runtime, bucket_bytes: int) -> None:
        self.runtime = runtime
        # Reversed, because backward makes the last layers' gradients first.
        self.parameters = parameters[::-1]
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size, device=parameters[0].device)  # [P]
        self._lanes = (
            torch.zeros(len(runtime.lanes), size, device=self.flat.device) if runtime.exact else None
        )  # [L, P]
        self._bounds: list[tuple[int, int]] = []
        self._bucket_of: dict[Parameter, int] = {}
        self._missing: list[int] = []
        self._handles: list[dist.Work] = []
        self._overlapping = False
        self._lay_out(bucket_bytes)

    def _lay_out(self, bucket_bytes: int) -> None:
        start = offset = 0
        for parameter in self.parameters:
            parameter.grad = self.flat.as_strided(parameter.shape, parameter.stride(), offset)
            parameter.register_post_accumulate_grad_hook(self._arrived)
            self._bucket_of[parameter] = len(self._bounds)
            offset += parameter.numel()
            if (offset - start) * self.flat.element_size() >= bucket_bytes:
                self._bounds.append((start, offset))
                start = offset
        if self._bucket_of[parameter] == len(self._bounds):  # the last bucket is still open
            self._bounds.append((start, offset))

    def clear(self) -> None:
        self.flat.zero_()
        if self._lanes is not None:
            self._lanes.zero_()
        self._handles = []
        self._missing = [0] * len(self._bounds)
        for bucket in self._bucket_of.values():
            self._missing[bucket] += 1

    def add(self, total: Tensor, scale: Tensor, lane: int, overlap: bool) -> None:
        """Add the gradient of one part's loss; with `overlap`, buckets leave as soon as backward has filled them."""
        if total.requires_grad:
            self._overlapping = overlap and self.runtime.size > 1
            # `inputs` keeps the gradient off everybody else's parameters, such as a critic's in an actor's loss.
            torch.autograd.backward(total * scale.to(total), inputs=self.parameters)
            self._overlapping = False
        if self._lanes is not None:
            self._lanes[lane] += self.flat
            self.flat.zero_()

    def finish(self) -> bool:
        """Wait until `flat` holds the sum over the whole run; False if exact mode met a number that is not finite."""
        if self._lanes is not None:
            return self._sum_integers(self._lanes)
        if self.runtime.size > 1:
            # What backward did not fill (a head unused here, a loss that touches nothing) is zero, and joins now.
            while len(self._handles) < len(self._bounds):
                self._launch_next()
            for handle in self._handles:
                handle.wait()
        return True

    def _arrived(self, parameter: Tensor) -> None:
        if not self._overlapping:
            return  # an earlier micro-batch: what it brought is not yet all of it
        self._missing[self._bucket_of[parameter]] -= 1  # type: ignore[index]
        # In one fixed order on every process: two buckets of equal size would else be summed crosswise without a word.
        while len(self._handles) < len(self._bounds) and not self._missing[len(self._handles)]:
            self._launch_next()

    def _launch_next(self) -> None:
        start, stop = self._bounds[len(self._handles)]
        self._handles.append(dist.all_reduce(self.flat[start:stop], async_op=True))

    def _sum_integers(self, lanes: Tensor) -> bool:
        """Sum the lanes as 64-bit integers: no rounding, so no order, so the same bits on any number of processes."""
        finite = torch.isfinite(lanes).all()
        largest = lanes.abs().max() if finite else lanes.new_zeros(())
        # A flag beside the scale, because a MAX reduction may lose a NaN and every bad number casts to one integer.
        extremes = torch.stack([largest.double(), (~finite).double()])
        largest_of_all, bad = self.runtime.max(extremes).tolist()
        if bad:
            return False
        headroom = math.ceil(math.log2(self.runtime.lanes.count)) + 1
        scale = 2.0 ** (62 - headroom - math.frexp(largest_of_all)[1]) if largest_of_all else 1.0
        total = torch.zeros(lanes.shape[1], dtype=torch.int64, device=lanes.device)
        for chunk, of_lanes in zip(total.split(_CHUNK), lanes.split(_CHUNK, dim=1), strict=True):
            torch.sum((of_lanes.double() * scale).to(torch.int64), dim=0, out=chunk)
        self.runtime.sum(total)
        self.flat.copy_(total.double() / scale)
        return True


_CHUNK = 2**15
"""Columns converted to integers at a time, so that they stay in the cache."""


class LossScale:
    """The factor that keeps fp16 gradients above underflow: halved when one overflows, doubled after a long calm."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = torch.tensor(2.0**16 if enabled else 1.0, dtype=torch.float64)
        self.good_steps = torch.zeros((), dtype=torch.int64)

    def factor(self, samples: int) -> Tensor:
        """What a loss over so many samples is multiplied by; fp16 has room for a mean, not for a sum."""
        return self.value / samples if self.enabled else self.value

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        self.good_steps.copy_(self.good_steps + 1 if finite else torch.zeros_like(self.good_steps))
        if not finite:
            self.value.mul_(0.5).clamp_(min=1.0)
        elif self.good_steps >= 2000:
            self.value.mul_(2.0)
            self.good_steps.zero_()


def _split(batch: Tree, pieces: int) -> list[Tree]:
    """A batch [L, N, ...] cut along its samples."""
    if pieces == 1:
        return [batch]
    samples = first_leaf(batch).shape[1]
    step = -(-samples // pieces)
    return [tree_map(lambda x, s=s: x[:, s : s + step], batch) for s in range(0, samples, step)]


def _scalar(value: Tensor | int, like: Tensor) -> Tensor:
    return torch.as_tensor(value, device=like.device).detach().double()
