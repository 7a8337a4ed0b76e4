"""Process groups, collectives and distributed optimization. No other package communicates between ranks."""

from lockstep.distributed.nonfinite import NonFiniteError
from lockstep.distributed.optimizer import DistributedOptimizer
from lockstep.distributed.runtime import Runtime
from lockstep.ops.fused_adam import FusedAdam

__all__ = ["DistributedOptimizer", "FusedAdam", "NonFiniteError", "Runtime"]
