"""Distributed optimizer: the only code that changes parameters.

Losses are sums with a sample count. `step` runs backward on the local lanes, all-reduces the gradient, divides it by
the global count, clips it and calls the torch optimizer.

Shapes: L local lanes, N samples per lane, K sums. A batch is [L x N, ...], lane after lane.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed.collectives import CompletedHandle, Handle
from lockstep.distributed.device_steps import MAX_UNCONFIRMED, DeviceSteps, RecordedStep
from lockstep.distributed.gradient_buffer import GradientBuffer
from lockstep.distributed.lane_gradients import LaneGradients, lane_gradients
from lockstep.distributed.nonfinite import LossScale, NonFinitePolicy
from lockstep.distributed.runtime import Runtime
from lockstep.metrics import Metrics, widen
from lockstep.protocols import LossFunction, StateDict
from lockstep.pytree import Tree, first_leaf, load_into, tree_map
from lockstep.transfer import upload


class DistributedOptimizer:
    """A torch optimizer that steps on the gradient of all processes."""

    def __init__(
        self,
        runtime: Runtime,
        torch_optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        not_compiled: str = "",
    ) -> None:
        """Wrap a torch optimizer that is fused, such as `lockstep.distributed.FusedAdam`, and has named parameters.

        `not_compiled`: the reason why `run.compile` does not apply to the losses; empty if it applies.
        """
        if not getattr(torch_optimizer, "_step_supports_amp_scaling", False):
            # A fused step divides, checks and skips on the device, without another pass over the gradient or a sync.
            raise ValueError(
                f"{type(torch_optimizer).__name__} was not created with fused=True.\n"
                "Use lockstep.distributed.FusedAdam, or one of torch's optimizers that supports it: Adam, AdamW, SGD "
                "or Adagrad."
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
        """Loss scale of the current step."""
        self._on_cpu = device.type == "cpu"
        self.nonfinite_policy = NonFinitePolicy(runtime)
        self._unconfirmed: list[_Unconfirmed] = []
        # With on_nonfinite "stop", the device skips all steps after a skipped one, so that the host can recompute the
        # failing step with the same parameters. fp16 overflows are normal: only the overflowing step is skipped.
        halts = runtime.nonfinite == "stop" and not self._loss_scale.enabled
        if runtime.halted is None and not self._on_cpu:
            runtime.halted = torch.zeros((), device=device)
        mode = runtime.compilation.mode
        self._compiles, self._records = mode == "on" and not not_compiled, mode == "graphs" and not not_compiled
        if not_compiled and mode != "off":
            runtime.compilation.note(f"run.compile does not apply to these updates: {not_compiled}.")
        self._losses: dict[LossFunction, LossFunction] = {}
        self._recorded: dict[LossFunction, RecordedStep] = {}
        self._steps = None if self._on_cpu else DeviceSteps(device, runtime.halted if halts else None, self._records)
        if self._records:  # a CUDA graph reads the learning rate from a fixed address
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
        """Take one step on the batches [L x N, ...] of all processes.

        Args:
            loss: Returns sums over samples. Called with the whole batch, or in exact mode with one lane at a time.
            batch: Batch of the local lanes.
            learning_rate: Rate of the first parameter group; other groups keep their ratio to it.
            where: Position in the run, for reports of non-finite values.
            rebuild: Creates the same batch again, so that batches are not kept until steps are confirmed.

        Returns:
            Metrics of the whole run.
        """
        if self._steps is not None and len(self._unconfirmed) == MAX_UNCONFIRMED:
            self.check_last_step()
        self._set_rates(learning_rate)
        if self.runtime.before_update is not None:
            self.runtime.before_update(self, loss, batch, where)
        if self._records:
            if loss not in self._recorded:
                self._recorded[loss] = self._record(loss)
            names, row = self._recorded[loss](batch)
            skip = None
        else:
            names, totals = self._backward(self._compiled(loss), batch)  # [K] of the whole run: count, sums
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
        """Create the step on this loss as CUDA graphs."""
        backward = partial(self._backward, loss, overlap=False)
        name = getattr(loss, "__name__", "a loss")
        return RecordedStep(self.runtime, self.gradient, backward, lambda totals: self._apply(totals)[1], name)

    def _compiled(self, loss: LossFunction) -> LossFunction:
        if not self._compiles:
            return loss
        if loss not in self._losses:
            self._losses[loss] = self.runtime.compilation(loss, getattr(loss, "__name__", "a loss"))
        return self._losses[loss]

    def _apply(self, totals: Tensor) -> tuple[Tensor, Any]:
        """Step on the reduced gradient. Return whether the step was skipped, and a row for the log."""
        # The only place where a gradient is divided, by the global count and the clipping factor.
        if self._steps is None:
            prepared: tuple[Tensor, Tensor, Any] = self._prepare_step(totals, self._scale)
        else:
            prepared = self._steps.prepare_step(self.gradient.flat, totals, self._scale, self.max_grad_norm)
        divisor, skip, row = prepared
        self._inner.grad_scale, self._inner.found_inf = divisor, skip  # type: ignore[attr-defined]
        self._inner.step()
        self._loss_scale.update(skip)
        return skip, row

    def _prepare_step(self, totals: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, np.ndarray]:
        """Compute `DeviceSteps.prepare_step` with Python numbers, which are cheaper on a CPU than scalar tensors."""
        row = totals.tolist()
        divisor = max(row[0], 1.0) * (1.0 if scale is None else scale.item())
        norm = torch.linalg.vector_norm(self.gradient.flat).item() / divisor
        finite = norm < math.inf
        if self.max_grad_norm is not None and finite:
            divisor *= max(norm / self.max_grad_norm, 1.0)
        return torch.tensor(divisor), torch.tensor(float(not finite)), np.array([*row, norm])

    def check_last_step(self) -> None:
        """Check which steps were applied. Steps with non-finite gradients are skipped or abort the run.

        This synchronizes with the device, so algorithms call it once, after the steps of an iteration. It may use
        collectives, so all processes must call it after the same step.
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
                update = f"update {step.number} ({step.where})" if step.where else f"update {step.number}"
                what = f"the gradient of {update} is not finite:"
                self.nonfinite_policy.handle(what, self._find_nonfinite(step.loss, batch), _ADVICE, {"batch": batch})

    def shared_state(self) -> StateDict:
        """Return the live tensors of the optimizer by name."""
        self.check_last_step()
        state = {"updates": self.updates, "skipped_in_a_row": self.nonfinite_policy.consecutive_skips}
        if self._loss_scale.enabled:
            state |= {"loss_scale": self._loss_scale.value, "good_steps": self._loss_scale.good_steps}
        for parameter, slots in self._inner.state.items():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    state[f"{self._names[parameter]}.{slot}"] = value
        return state

    def load_shared_state(self, state: StateDict) -> None:
        load_into(self.shared_state(), state, "the optimizer")

    def _backward(self, loss: LossFunction, batch: Tree, overlap: bool = True) -> tuple[tuple[str, ...], Tensor]:
        """Accumulate the gradient of all micro-batches. Return the names of the sums, and the global sums, [K].

        Without `overlap` nothing is reduced: the sums are those of this process.
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
                    # Launched before backward, to overlap with it and to be the first collective on every process.
                    totals = rows[0].clone() if runtime.size > 1 else rows[0]
                    if overlap:
                        handle = runtime._start_sum("totals", totals)
                gradient.backward(result.loss_sum if scale is None else result.loss_sum * scale, lane, last and overlap)
        if runtime.exact:
            totals = upload(runtime.exact_sum(torch.stack(rows)), gradient.flat.device)
        handle.wait()
        return names, totals

    def _row(self, samples: Tensor | int, *sums: Tensor) -> Tensor:
        """Concatenate a count and sums, [K], in a dtype wide enough to be summed over processes."""
        if self._on_cpu:
            numbers = [x.item() if isinstance(x, Tensor) else x for x in (samples, *sums)]
            return torch.tensor(numbers, dtype=torch.float64)  # cheaper than torch.stack
        if isinstance(samples, int):
            if samples not in self._counts:  # cached, because copying a number to the device makes the host wait
                self._counts[samples] = widen(torch.full((), float(samples), device=sums[0].device))
            samples = self._counts[samples]
        return torch.stack([widen(samples), *sums]).detach()

    def _set_rates(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            # Groups keep their ratio to the first group, whose rate the caller sets. It may be zero.
            first = self._base_rates[0]
            for number, base in enumerate(self._base_rates):
                self._set_rate(number, learning_rate * base / first if first else learning_rate)

    def _set_rate(self, group: int, rate: float) -> None:
        if not self._on_cpu:
            rate = float(np.float32(rate))  # as in a CUDA graph, so that steps are equal with and without graphs
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

    def lane_gradients(self, loss: LossFunction, batch: Tree) -> Iterator[LaneGradients]:
        """Yield loss and gradient of every local lane of a batch [L x N, ...], computed again."""
        return lane_gradients(self.runtime, self._names, loss, batch)

    def _find_nonfinite(self, loss: LossFunction, batch: Tree) -> list[str]:
        """Describe non-finite values per local lane. Recomputes the gradients, because the reduced one is a sum."""
        found = []
        for lane, _, sums, gradients in self.lane_gradients(loss, batch):
            terms = [name for name, value in sums.items() if not value.isfinite()]
            bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
            if terms:
                found.append(f"lane {lane}: {', '.join(terms)} of its loss")
            elif bad:
                more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
                found.append(f"lane {lane}: its loss is finite, its gradient is not in {', '.join(bad[:3])}{more}")
        return found


_ADVICE = "Lower the learning rate or the clipping norm, or use --run.on-nonfinite skip to skip such updates."


class _Unconfirmed(NamedTuple):
    """A step that the host has not confirmed as applied yet."""

    number: int
    loss: LossFunction
    rebuild: Callable[[], Tree]
    where: str


def _split(batch: Tree, num_pieces: int, lanes: int) -> list[Tree]:
    """Split a batch into micro-batches, each with a part of every lane."""
    if num_pieces == 1:
        return [batch]
    samples = len(first_leaf(batch)) // lanes
    step = -(-samples // num_pieces)
    return [
        tree_map(lambda x, s=start: x.unflatten(0, (lanes, samples))[:, s : s + step].flatten(0, 1), batch)
        for start in range(0, samples, step)
    ]
