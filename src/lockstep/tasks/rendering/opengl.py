"""Preparation before OpenGL is loaded."""

from contextlib import suppress
from functools import cache


@cache
def prepare_opengl() -> None:
    """Import Triton if it is installed, as it is with CUDA builds of torch.

    Mesa's software renderer and Triton both include LLVM. A process that loads Mesa first crashes when torch's compiler
    imports Triton later. In the other order both work.
    """
    with suppress(ImportError):
        import triton  # noqa: F401
