"""Imported once by the server of `processes.py`: numba takes a second before the first of its kernels runs, and whoever
is forked after that need not wait for it."""

import torch

from lockstep.ops.cpu_kernels import categorical_log_prob_entropy

categorical_log_prob_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
