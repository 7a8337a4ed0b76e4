"""Train with every precision on one GPU: check for finite weights and compare the first gradient with fp32."""

from typing import Any

import torch

from lockstep.config import apply_overrides
from lockstep.tools.doctor.gpu.gradients import Agent, difference, recording
from lockstep.tools.doctor.gpu.machine import product_error
from lockstep.tools.doctor.gpu.recipes import GPU, smoke_recipe
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord

RECIPE = "snake-ppo"
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"run.tf32": True},
    "bf16": {"run.precision": "bf16"},
    "fp16": {"run.precision": "fp16"},
    "amp": {"run.precision": "amp"},
}
TOLERANCE = 0.5
"""Largest distance of the gradient from fp32. Rounding may change an action, and then the rest of the rollout."""
PRODUCT_TOLERANCE = {"fp32": 1e-5, "tf32": 3e-3, "bf16": 2e-2, "fp16": 3e-3, "amp": 2e-2}
"""Largest relative error of a matrix product."""
ITERATIONS = 2


def precision(record: ResultRecord) -> None:
    """Train some updates in every precision."""
    recipe = smoke_recipe(RECIPE)
    reference: Any = None
    for name, settings in SETTINGS.items():
        with record.part(name):
            agent = Agent(apply_overrides(recipe, settings), GPU)
            with recording() as first:
                for _ in range(1 if record.quick else ITERATIONS):
                    agent.iterate()
            found: dict[str, Any] = {"dtype": str(agent.runtime.autocast_dtype or torch.float32).removeprefix("torch.")}
            found |= {"updates": int(agent.algorithm.updates), "finite": agent.finite()}
            agent.close()
            reference = reference or first
            flat_gradients = [torch.cat([part.flatten() for part in gradient]) for gradient in (first[0], reference[0])]
            # fp16 gradients include the loss scale, so only directions are compared. The initial loss scale may
            # overflow a gradient; that update is skipped.
            if found["dtype"] == "float16" and not flat_gradients[0].isfinite().all():
                found["difference_from_fp32"], found["overflowed"] = None, True
            else:
                found["difference_from_fp32"] = difference(flat_gradients[:1], flat_gradients[1:], normalize=True)
            found["product_error"] = product_error(GPU, agent.runtime.autocast_dtype or torch.float32)
            record.add(name, found)
            check(name, found)


def check(name: str, found: dict[str, Any]) -> None:
    """Raise Failure if a precision differs more from fp32 than its rounding explains."""
    distance, error = found["difference_from_fp32"], found["product_error"]
    if not found["finite"]:
        raise Failure("weights are non-finite")
    if distance is not None and not distance <= TOLERANCE:
        raise Failure(f"the first gradient is {distance:.1e} from fp32's, more than {TOLERANCE}")
    if not error <= PRODUCT_TOLERANCE[name]:
        raise Failure(f"a matrix product has a relative error of {error:.1e}, more than {PRODUCT_TOLERANCE[name]:.0e}")
