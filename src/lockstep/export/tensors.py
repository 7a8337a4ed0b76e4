"""Tensors that torch saved, read without running anything: the only place where lockstep opens a pickle.

torch's own reader of weights knows tensors and plain containers, and refuses a file that names anything else.
"""

from pathlib import Path
from typing import IO

import torch
from torch import Tensor

_LIMIT = 4 * 2**30


def read_tensors(file: Path | IO[bytes]) -> dict[str, Tensor]:
    """The tensors of a saved state dict by name; ValueError, in words, for anything else."""
    if isinstance(file, Path) and file.stat().st_size > _LIMIT:
        raise ValueError(f"it has more than {_LIMIT // 2**30} GiB")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that it refuses, a zip that is none: whatever torch has to say
        raise ValueError(f"torch does not read it as weights alone ({str(error).splitlines()[0][:200]})") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]  # as several libraries wrap it
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError("it is no state dict")
    return {str(name): tensor for name, tensor in found.items()}
