"""Run a numba kernel once when imported by the server of `multiprocess.py`, so that forked processes save the second of
numba's first call."""

import torch

from lockstep.ops.cpu_kernels import categorical_log_prob_entropy

categorical_log_prob_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
