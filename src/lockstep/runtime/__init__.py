"""The only place that talks to other processes."""

from lockstep.runtime.optimizer import Optimizer
from lockstep.runtime.runtime import Runtime

__all__ = ["Optimizer", "Runtime"]
