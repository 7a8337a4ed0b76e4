"""Base classes for user code: environments, data sets and algorithms.

A task implements `setup`, `reset`, `observations` and `step`. An algorithm implements `setup`, `collect`, `update` and
`policy`. Everything else has a default. The state in a checkpoint is derived from registered tensors, and from the
modules, optimizers and collectors that an algorithm holds as attributes.

Shapes: L local lanes, E environments per lane, B = L x E local environments in lane order.
"""

from lockstep.base.algorithm import Algorithm
from lockstep.base.dataset import Dataset
from lockstep.base.vec_env import VecEnv

__all__ = ["Algorithm", "Dataset", "VecEnv"]
