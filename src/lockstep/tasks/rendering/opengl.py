"""What must happen before OpenGL is loaded."""

from contextlib import suppress
from functools import cache


@cache
def prepare_opengl() -> None:
    """Import Triton where it is installed, as CUDA builds of torch have it.

    Mesa's software renderer and Triton both bring LLVM: a process that loads Mesa first crashes when torch's compiler
    imports Triton later. In the other order both work.
    """
    with suppress(ImportError):
        import triton  # noqa: F401
