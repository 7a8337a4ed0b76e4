"""Run a numba kernel once when imported by the server of `multiprocess.py`, so that forked processes save the second of
numba's first call."""

import torch

from lockstep.ops.cpu_kernels import CategoricalCPU

CategoricalCPU.apply(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
