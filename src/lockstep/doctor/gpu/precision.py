"""Every precision on one GPU: some updates, finite weights, and the distance of the first gradient from fp32's."""

from typing import Any

import torch

from lockstep.config import overlay
from lockstep.doctor.gpu.gradients import Agent, difference, recording
from lockstep.doctor.gpu.recipes import GPU, smoke_recipe
from lockstep.doctor.gpu.worker import Failure, Record

RECIPE = "snake-ppo"
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"run.tf32": True},
    "bf16": {"run.precision": "bf16"},
    "fp16": {"run.precision": "fp16"},
    "amp": {"run.precision": "amp"},
}
TOLERANCE = {"fp32": 0.0, "tf32": 0.02, "bf16": 0.25, "fp16": 0.1, "amp": 0.25}
"""Largest distance of the whole gradient's direction from fp32's."""
ITERATIONS = 2
PRODUCT = 1024
"""Terms of each sum of the matrix product whose rounding is measured."""


def precision(record: Record) -> None:
    """Train some updates in every precision."""
    recipe = smoke_recipe(RECIPE)
    reference: Any = None
    for name, settings in SETTINGS.items():
        with record.part(name):
            agent = Agent(overlay(recipe, settings), GPU)
            with recording() as first:
                for _ in range(1 if record.quick else ITERATIONS):
                    agent.iterate()
            found: dict[str, Any] = {"dtype": str(agent.runtime.half or torch.float32).removeprefix("torch.")}
            found |= {"updates": int(agent.algorithm.updates), "finite": agent.finite()}
            agent.close()
            reference = reference or first
            whole = [torch.cat([part.flatten() for part in gradient]) for gradient in (first[0], reference[0])]
            # fp16 gradients carry the factor of loss scaling: directions are compared.
            found["difference_from_fp32"] = difference(whole[:1], whole[1:], normalize=True)
            found["product_error"] = product_error(agent.runtime.half or torch.float32)
            record.add(name, found)
            if not found["finite"]:
                raise Failure("weights are not finite")
            if not found["difference_from_fp32"] <= TOLERANCE[name]:
                raise Failure(f"the first gradient is {found['difference_from_fp32']:.1e} from fp32's")


def product_error(dtype: torch.dtype) -> float:
    """Relative error of a matrix product, with the arithmetic that is set now, against double precision."""
    a = torch.linspace(-1.0, 1.0, 64 * PRODUCT).view(64, PRODUCT).sin()
    wanted = a.double() @ a.double().T
    on_gpu = a.to(GPU, dtype)
    return float(((on_gpu @ on_gpu.T).cpu().double() - wanted).norm() / wanted.norm())
