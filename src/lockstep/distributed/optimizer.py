"""Optimizer: the only way a parameter changes.

A loss comes in as a sum and a count; out of `step` comes an update made from the gradient of the whole run: backward on
the local lanes, one reduction, division by the global count, clipping, the torch optimizer's step.

Shapes: L local lanes, N samples a lane, K sums. A batch is [L x N, ...], lane after lane.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.distributed.collectives import CompletedHandle, Handle
from lockstep.distributed.device_steps import MAX_UNCONFIRMED, DeviceSteps, RecordedStep
from lockstep.distributed.gradient_buffer import GradientBuffer
from lockstep.distributed.nonfinite import NonFinitePolicy
from lockstep.distributed.runtime import Runtime
from lockstep.metrics import Metrics, widen
from lockstep.protocols import LossFunction, StateDict
from lockstep.pytree import Tree, first_leaf, load_into, tree_map
from lockstep.transfer import upload


class DistributedOptimizer:
    """A torch optimizer whose every step is taken by all processes together."""

    def __init__(
        self,
        runtime: Runtime,
        torch_optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        not_compiled: str = "",
    ) -> None:
        """`torch_optimizer` must be fused, as `lockstep.distributed.FusedAdam` is, and made of named parameters.

        `not_compiled` is why `run.compile` does not apply to its losses, if it does not.
        """
        if not getattr(torch_optimizer, "_step_supports_amp_scaling", False):
            # A fused step divides, checks and skips on the device: no pass over the gradient more, and nobody waits.
            raise ValueError(
                f"{type(torch_optimizer).__name__} was not made with fused=True.\n"
                "Use lockstep.distributed.FusedAdam, or one of torch's optimizers that has it: Adam, AdamW, SGD or "
                "Adagrad."
            )
        self.runtime = runtime
        self.max_grad_norm = max_grad_norm
        self.accumulate = accumulate
        self.updates = torch.zeros((), dtype=torch.int64)
        self._inner = torch_optimizer
        self._base_rates: list[float] = [group["lr"] for group in torch_optimizer.param_groups]
        self._rates = self._base_rates.copy()
        groups = torch_optimizer.param_groups
        self._names = {p: n for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
        self.gradient = GradientBuffer(list(self._names), runtime)
        device = self.gradient.flat.device
        self._loss_scale = LossScale(runtime.autocast_dtype == torch.float16, device)
        self._scale: Tensor | None = None
        """What the losses of the step under way are multiplied by."""
        self._on_cpu = device.type == "cpu"
        self.nonfinite_policy = NonFinitePolicy(runtime)
        self._unconfirmed: list[_Unconfirmed] = []
        # Once a step that stops the run was skipped, the device skips all that follow: what led to it can be computed
        # again when the host finds out. fp16 overflows now and then, and skips such steps alone.
        halts = runtime.nonfinite == "stop" and not self._loss_scale.enabled
        if runtime.halted is None and not self._on_cpu:
            runtime.halted = torch.zeros((), device=device)
        mode = runtime.compilation.mode
        self._compiles, self._records = mode == "on" and not not_compiled, mode == "graphs" and not not_compiled
        if not_compiled and mode != "off":
            runtime.compilation.note(f"run.compile does not apply to updates here: {not_compiled}.")
        self._losses: dict[LossFunction, LossFunction] = {}
        self._recorded: dict[LossFunction, RecordedStep] = {}
        self._steps = None if self._on_cpu else DeviceSteps(device, runtime.halted if halts else None, self._records)
        if self._records:  # a graph reads the rate from the same address every time
            for group in groups:
                group["lr"] = torch.full((), float(group["lr"]), device=device)
        self._counts: dict[int, Tensor] = {}
        self._create_state()

    def step(
        self,
        loss: LossFunction,
        batch: Tree,
        learning_rate: float | None = None,
        where: str = "",
        rebuild: Callable[[], Tree] | None = None,
    ) -> Metrics:
        """Take one step on a batch [L x N, ...] of the local lanes; the metrics returned are those of the whole run.

        `loss` gets the batch, or in exact mode one lane of it after another, and returns sums over samples. The batches
        of all processes together are the batch of the step. `where` in the run this is, for a report of non-finite
        values. `rebuild` makes the same batch again: with it, batches need not be kept until steps are confirmed.
        """
        if self._steps is not None and len(self._unconfirmed) == MAX_UNCONFIRMED:
            self.check_last_step()
        self._set_rates(learning_rate)
        if self._records:
            if loss not in self._recorded:
                self._recorded[loss] = self._record(loss)
            names, row = self._recorded[loss](batch)
            skip = None
        else:
            names, totals = self._backward(self._compiled(loss), batch)  # [K] of the whole run: the count, sums
            with self.runtime.phase("reduce"):
                self.gradient.wait()
            skip, row = self._apply(totals)
        self.updates += 1
        self.runtime.status.update += 1
        self._unconfirmed.append(_Unconfirmed(int(self.updates), loss, rebuild or (lambda: batch), where))
        if self._steps is None:
            self._confirm([not skip])
        metrics = Metrics()
        metrics.add_update(names, row)
        return metrics

    def _record(self, loss: LossFunction) -> RecordedStep:
        """The step on this loss as CUDA graphs."""

        def backward(batch: Tree) -> tuple[tuple[str, ...], Tensor]:
            return self._backward(loss, batch, overlap=False)

        def apply(totals: Tensor) -> Tensor:
            row: Tensor = self._apply(totals)[1]
            return row

        return RecordedStep(self.runtime, self.gradient, backward, apply, getattr(loss, "__name__", "a loss"))

    def _compiled(self, loss: LossFunction) -> LossFunction:
        if not self._compiles:
            return loss
        if loss not in self._losses:
            self._losses[loss] = self.runtime.compilation(loss, getattr(loss, "__name__", "a loss"))
        return self._losses[loss]

    def _apply(self, totals: Tensor) -> tuple[Tensor, Any]:
        """Take the step by the gradient of the whole run; whether it was skipped, and a row for the log."""
        # The one place where a gradient is divided: by the global count, and by what clipping asks for.
        if self._steps is None:
            settled: tuple[Tensor, Tensor, Any] = self._settle(totals, self._scale)
        else:
            settled = self._steps.settle(self.gradient.flat, totals, self._scale, self.max_grad_norm)
        divisor, skip, row = settled
        self._inner.grad_scale, self._inner.found_inf = divisor, skip  # type: ignore[attr-defined]
        self._inner.step()
        self._loss_scale.update(skip)
        return skip, row

    def _settle(self, totals: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, np.ndarray]:
        """What `DeviceSteps.settle` does, with plain numbers: on a CPU they are much cheaper than tensors of one."""
        row = totals.tolist()
        divisor = max(row[0], 1.0) * (1.0 if scale is None else scale.item())
        norm = torch.linalg.vector_norm(self.gradient.flat).item() / divisor
        finite = norm < math.inf
        if self.max_grad_norm is not None and finite:
            divisor *= max(norm / self.max_grad_norm, 1.0)
        return torch.tensor(divisor), torch.tensor(float(not finite)), np.array([*row, norm])

    def check_last_step(self) -> None:
        """Check which steps were applied. Those with non-finite gradients are skipped, or abort the run.

        On a device this waits for it, so algorithms call it once, after the steps of an iteration. All processes call
        it at the same step, because they exchange what they found.
        """
        if self._steps is not None and self._unconfirmed:
            self._confirm(self._steps.applied(len(self._unconfirmed)))

    def _confirm(self, applied: Sequence[bool]) -> None:
        steps, self._unconfirmed = self._unconfirmed, []
        for step, finite in zip(steps, applied, strict=True):
            if finite:
                self.nonfinite_policy.consecutive_skips.zero_()
            elif not (self._loss_scale.enabled and self.nonfinite_policy.tolerate_overflow()):
                batch = step.rebuild()
                place = f"update {step.number} ({step.where})" if step.where else f"update {step.number}"
                what = f"the gradient of {place} is not finite:"
                self.nonfinite_policy.handle(what, self._find_bad(step.loss, batch), _ADVICE, {"batch": batch})

    def state(self, prefix: str = "optimizer") -> StateDict:
        """The live tensors of the optimizer by name."""
        self.check_last_step()
        state = {
            f"{prefix}.updates": self.updates,
            f"{prefix}.skipped_in_a_row": self.nonfinite_policy.consecutive_skips,
        }
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

    def load_state(self, state: StateDict, prefix: str = "optimizer") -> None:
        load_into(self.state(prefix), state, prefix)

    def _backward(self, loss: LossFunction, batch: Tree, overlap: bool = True) -> tuple[tuple[str, ...], Tensor]:
        """Fill the gradient from all micro-batches; the names of the sums, and the sums of the whole run, [K].

        Without `overlap` nothing is sent: the sums are those of this process.
        """
        runtime, gradient = self.runtime, self.gradient
        samples = len(first_leaf(batch)) // len(runtime.lanes) * runtime.lanes.num_lanes
        scale = self._scale = self._loss_scale.factor(samples)
        gradient.clear()
        pieces = _split(batch, self.accumulate, len(runtime.lanes))
        rows: list[Tensor] = []
        names: tuple[str, ...] = ()
        totals = torch.empty(0)
        handle: Handle = CompletedHandle()
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            for lane, part in enumerate(runtime.iter_lanes(piece)):
                with runtime.autocast():
                    result = loss(part)
                names = ("loss", *result.metric_sums)
                row = self._row(result.num_samples, result.loss_sum, *result.metric_sums.values())
                if number == 0:
                    rows.append(row)
                else:
                    rows[lane] = rows[lane] + row
                if last and not runtime.exact:
                    # Launched before backward, so that it travels while backward runs, and first on every process.
                    totals = rows[0].clone() if runtime.size > 1 else rows[0]
                    if overlap:
                        handle = runtime._start_sum("totals", totals)
                gradient.backward(result.loss_sum if scale is None else result.loss_sum * scale, lane, last and overlap)
        if runtime.exact:
            totals = upload(runtime.exact_sum(torch.stack(rows)), gradient.flat.device)
        handle.wait()
        return names, totals

    def _row(self, samples: Tensor | int, *sums: Tensor) -> Tensor:
        """A count and sums next to each other, [K], wide enough to be summed over processes."""
        if self._on_cpu:
            numbers = [x.item() if isinstance(x, Tensor) else x for x in (samples, *sums)]
            return torch.tensor(numbers, dtype=torch.float64)  # cheaper than stacking them
        if isinstance(samples, int):
            if samples not in self._counts:  # kept, because bringing a number to the device makes the host wait
                self._counts[samples] = widen(torch.full((), float(samples), device=sums[0].device))
            samples = self._counts[samples]
        return torch.stack([widen(samples), *sums]).detach()

    def _set_rates(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            # Groups keep their proportions: the first group's rate is the one the caller names, and may be zero.
            first = self._base_rates[0]
            for number, base in enumerate(self._base_rates):
                self._set_rate(number, learning_rate * base / first if first else learning_rate)

    def _set_rate(self, group: int, rate: float) -> None:
        if not self._on_cpu:
            rate = float(np.float32(rate))  # as a graph reads it, so that recorded steps are those as written
        groups = self._inner.param_groups
        if not self._records:
            groups[group]["lr"] = rate
        elif self._rates[group] != rate:
            groups[group]["lr"].fill_(rate)
        self._rates[group] = rate

    def _create_state(self) -> None:
        """Make torch create the state now, so that it can be saved, restored and compared from the start."""
        self.gradient.clear()
        self.gradient.zero_missing()
        self._set_rates(0.0)
        self._inner.step()
        for slots in self._inner.state.values():
            for value in slots.values():
                if isinstance(value, Tensor):
                    value.zero_()
        for number, base in enumerate(self._base_rates):
            self._set_rate(number, base)

    def _find_bad(self, loss: LossFunction, batch: Tree) -> list[str]:
        """What is not finite on each lane here, in words: computed anew, because reducing has mixed the gradients."""
        found = []
        for lane, part in zip(self.runtime.lanes.local, self.runtime._lane_parts(batch), strict=True):
            with self.runtime.autocast():
                result = loss(part)
            sums = {"loss": result.loss_sum, **result.metric_sums}
            terms = [name for name, value in sums.items() if not torch.as_tensor(value).isfinite()]
            slopes: Sequence[Tensor | None] = ()
            if result.loss_sum.requires_grad:
                slopes = torch.autograd.grad(result.loss_sum, list(self._names), allow_unused=True)
            pairs = zip(self._names.values(), slopes, strict=False)
            bad = [name for name, slope in pairs if slope is not None and not slope.isfinite().all()]
            if terms:
                found.append(f"lane {lane}: {', '.join(terms)} of its loss")
            elif bad:
                more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
                found.append(f"lane {lane}: its loss is finite, its gradient is not in {', '.join(bad[:3])}{more}")
        return found


_ADVICE = "Lower the learning rate or the clipping norm, or use --run.on-nonfinite skip to leave such updates out."


class _Unconfirmed(NamedTuple):
    """A step of which the host does not know yet whether it was applied."""

    number: int
    loss: LossFunction
    rebuild: Callable[[], Tree]
    where: str


class LossScale:
    """The factor that keeps fp16 gradients above underflow: halved when one overflows, doubled after a long calm."""

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self.value = torch.full((), 2.0**16, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def factor(self, samples: int) -> Tensor | None:
        """What a loss over so many samples is multiplied by; fp16 has room for a mean, not for a sum."""
        return self.value / samples if self.enabled else None

    def update(self, found_inf: Tensor) -> None:
        if self.enabled:
            torch._amp_update_scale_(self.value, self.good_steps, found_inf, 2.0, 0.5, 2000)
            self.value.clamp_(min=1.0)


def _split(batch: Tree, pieces: int, lanes: int) -> list[Tree]:
    """A batch cut into micro-batches, each with its part of every lane."""
    if pieces == 1:
        return [batch]
    samples = len(first_leaf(batch)) // lanes
    step = -(-samples // pieces)

    def cut(x: Tensor, start: int) -> Tensor:
        piece: Tensor = x.unflatten(0, (lanes, samples))[:, start : start + step].flatten(0, 1)
        return piece

    return [tree_map(lambda x, s=start: cut(x, s), batch) for start in range(0, samples, step)]


class FusedAdam(torch.optim.Adam):
    """torch's fused Adam without torch's compiler; AdamW with `decoupled_weight_decay=True`.

    torch imports its compiler when an optimizer is built and when it steps, only to exclude both from compilation. The
    import takes as long as importing torch itself, in every process of a run, which compiles nothing.
    """

    def __init__(self, parameters: ParamsT, **options: Any) -> None:
        super().__init__(parameters, fused=True, **options)

    # What torch wraps to ward off its compiler, unwrapped.
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))

    def _accelerator_graph_capture_health_check(self) -> None:
        """Skip a check that asks the GPU: it would take one into use even where parameters are on the CPU."""
