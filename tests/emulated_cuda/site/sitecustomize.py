"""Gives a Python process emulated CUDA devices where EMULATED_GPUS says how many."""

import os
import sys
from pathlib import Path

if os.environ.get("EMULATED_GPUS"):
    sys.path.append(str(Path(__file__).parents[2]))
    import emulated_cuda

    emulated_cuda.install()
