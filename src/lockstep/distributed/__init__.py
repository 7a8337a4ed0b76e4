"""The only place that talks to other processes."""

from lockstep.distributed.nonfinite import NonFiniteError
from lockstep.distributed.optimizer import DistributedOptimizer, FusedAdam
from lockstep.distributed.runtime import Runtime

__all__ = ["DistributedOptimizer", "FusedAdam", "NonFiniteError", "Runtime"]
