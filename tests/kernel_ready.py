"""Imported once by the server of `processes.py`: numba takes a second before the first of its kernels runs, and whoever
is forked after that need not wait for it."""

import torch

from lockstep.compiled import judge_choices

judge_choices(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
