"""Adam that torch fuses into one kernel."""

import inspect
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class FusedAdam(torch.optim.Adam):
    """torch's fused Adam without importing torch's compiler; AdamW with `decoupled_weight_decay=True`.

    torch imports its compiler when an optimizer is created and when it steps, only to exclude both from compilation.
    The import takes as long as importing torch itself, in every process.
    """

    def __init__(self, parameters: ParamsT, **options: Any) -> None:
        super().__init__(parameters, fused=True, **options)

    # Remove the wrappers that exclude these methods from compilation.
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))

    def _accelerator_graph_capture_health_check(self) -> None:
        """Skip this check, which would initialize a GPU even if all parameters are on the CPU."""
