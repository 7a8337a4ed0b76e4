"""Record the gradients of a recipe's first update, and compare them between devices or precisions."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from lockstep.clock import TrainState
from lockstep.config import Recipe, resolve_lanes
from lockstep.distributed import Runtime
from lockstep.distributed.gradient_buffer import GradientBuffer
from lockstep.launch.device import configure_torch
from lockstep.launch.world import WorldInfo
from lockstep.training_loop import iterate

NEVER = 10**9
"""Updates between replica checks: never, because there is only one process."""
MIN_RELATIVE_NORM = 1e-3
"""Lower bound of a parameter's gradient norm, relative to the whole gradient: below it there is only rounding."""


class Agent:
    """Recipe in one process on one device, without a run directory. It trains single iterations."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        configure_torch(recipe.run, WorldInfo())
        self.runtime = Runtime.single_process(resolve_lanes(recipe.run, 1), device)
        self.task: Any = recipe.task.build(self.runtime.lanes, self.runtime.device)
        self.algorithm: Any = recipe.algo.build(self.task, self.runtime)
        self.clock = TrainState(total_samples=2**62)

    def iterate(self, until: Callable[[], bool] | None = None, max_iterations: int = 1000) -> None:
        """Train one iteration, or iterations until a condition holds."""
        for _ in range(max_iterations):
            iterate(self.task, self.algorithm, self.clock, self.runtime, NEVER)
            if until is None or until():
                return

    def learned(self) -> bool:
        """Whether there was an update. Algorithms with replay first collect without one."""
        return bool(self.algorithm.updates > 0)

    def finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.algorithm.model_state_dict().values())

    def close(self) -> None:
        self.task.close()


@contextlib.contextmanager
def recording() -> Iterator[list[list[Tensor]]]:
    """Record the first gradient of every optimizer, by parameter, in double precision on the CPU.

    A gradient is recorded when it is summed over the batch, before clipping and before any parameter changes.
    """
    wait = GradientBuffer.wait
    recorded_buffers: list[GradientBuffer] = []
    first: list[list[Tensor]] = []

    def record_first(self: GradientBuffer) -> None:
        wait(self)
        if not any(self is gradient for gradient in recorded_buffers):
            recorded_buffers.append(self)
            sizes = [parameter.numel() for parameter in self.parameters]
            first.append(list(self.flat.detach().cpu().double().split(sizes)))

    GradientBuffer.wait = record_first  # type: ignore[method-assign]
    try:
        yield first
    finally:
        GradientBuffer.wait = wait  # type: ignore[method-assign]


def first_gradients(recipe: Recipe, device: str) -> list[list[Tensor]]:
    """Gradients of the first update of every optimizer, by parameter."""
    agent = Agent(recipe, device)
    with contextlib.closing(agent), recording() as first:
        agent.iterate(agent.learned)
    return first


def difference(gradients: list[Tensor], expected: list[Tensor], normalize: bool = False) -> float:
    """Return the largest relative difference of a parameter's gradient.

    `normalize` scales the whole gradients to equal norm, so that only their directions are compared.
    """
    expected_norm, norm = float(get_total_norm(expected)), float(get_total_norm(gradients))
    if not expected_norm:
        return 0.0 if not norm else float("inf")
    scale = expected_norm / norm if normalize and norm else 1.0
    return max(
        float((a * scale - b).norm()) / max(float(b.norm()), MIN_RELATIVE_NORM * expected_norm)
        for a, b in zip(gradients, expected, strict=True)
    )
