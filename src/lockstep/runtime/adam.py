"""torch's Adam without torch's compiler.

torch imports its compiler when an optimizer is built and when it steps, only to keep it from looking at either. That
takes as long as importing torch itself, in every process of a run, which compiles nothing.
"""

import inspect
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Adam(torch.optim.Adam):
    """torch's, fused, with the options of torch's; with `decoupled_weight_decay=True` it is AdamW."""

    def __init__(self, parameters: ParamsT, **options: Any) -> None:
        super().__init__(parameters, fused=True, **options)

    # What torch wraps to ward off its compiler, unwrapped.
    add_param_group = inspect.unwrap(torch.optim.Adam.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Adam.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))

    def _accelerator_graph_capture_health_check(self) -> None:
        """Skip a check that asks the GPU: it would take one into use even where parameters are on the CPU."""
