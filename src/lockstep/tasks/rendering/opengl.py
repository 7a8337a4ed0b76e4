"""Rendering without a display: OpenGL for MuJoCo (backend, preparation, errors with a fix), and SDL for pygame."""

import ctypes.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from lockstep.config import ConfigError

MUJOCO_GL = "MUJOCO_GL"
"""Environment variable with the backend that MuJoCo renders with."""
_MODULES = ("mujoco.", "OpenGL.", "glfw", "gymnasium.envs.mujoco.mujoco_rendering")
"""Modules that create an OpenGL context for MuJoCo."""


@cache
def prepare_opengl() -> None:
    """Import Triton if it is installed, as it is with CUDA builds of torch.

    Mesa's software renderer and Triton both include LLVM. A process that loads Mesa first crashes when torch's compiler
    imports Triton later. In the other order both work.
    """
    with suppress(ImportError):
        import triton  # noqa: F401


def prepare_sdl() -> None:
    """Let pygame draw without a display if there is none. It prints an error otherwise."""
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def headless_backend() -> str:
    """Choose EGL if installed, with or without a GPU, then OSMesa; otherwise disable rendering."""
    if os.name != "posix" or sys.platform == "darwin":
        return "glfw"
    libraries = {"egl": "EGL", "osmesa": "OSMesa"}
    return next((backend for backend, library in libraries.items() if ctypes.util.find_library(library)), "disabled")


def render_error(name: str, error: BaseException) -> ConfigError:
    """Return an error that says how to render MuJoCo without a display."""
    backend = os.environ.get(MUJOCO_GL, "")
    return ConfigError(
        f"{name} cannot be rendered here ({MUJOCO_GL}={backend}): {error}",
        f"Install EGL (apt install libegl1 libgl1-mesa-dri) and set {MUJOCO_GL}=egl, "
        f"or OSMesa (apt install libosmesa6) and set {MUJOCO_GL}=osmesa.",
    )


@contextmanager
def convert_opengl_errors(name: str) -> Iterator[None]:
    """Convert errors of MuJoCo's OpenGL backends, which raise arbitrary exceptions, to a ConfigError with a fix."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) and _raised_by_opengl(error):
            raise render_error(name, error) from error
        raise


def _raised_by_opengl(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).startswith(_MODULES) for frame, _ in frames)
