"""The only place that talks to other processes."""

from lockstep.runtime.adam import Adam
from lockstep.runtime.bad_numbers import BadNumbers
from lockstep.runtime.optimizer import Optimizer
from lockstep.runtime.runtime import Runtime

__all__ = ["Adam", "BadNumbers", "Optimizer", "Runtime"]
