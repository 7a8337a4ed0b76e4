"""Check whether this machine can render frames, with or without a display."""

import importlib.util
import io
import os
from collections.abc import Iterator

import numpy as np
from PIL import Image

from lockstep.tasks.rendering.opengl import headless_backend
from lockstep.tools.doctor.finding import CheckResult, failure, ok, warning


def check_rendering() -> Iterator[CheckResult]:
    """Write a GIF, render a Gymnasium frame if pygame is installed, and check OpenGL settings if MuJoCo is."""
    frames = [Image.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (0, 255)]
    try:
        frames[0].save(io.BytesIO(), format="GIF", save_all=True, append_images=frames[1:])
    except (OSError, ValueError) as error:
        yield failure("rendering", f"pillow cannot write a GIF: {error}", "pip install --force-reinstall pillow")
        return
    yield ok("rendering", "GIFs can be written")
    if importlib.util.find_spec("pygame") is None:
        yield ok("rendering", "no pygame: to render Gymnasium's classic tasks, pip install 'lockstep-rl[gym]'")
    else:
        yield from _gymnasium()
    if importlib.util.find_spec("mujoco") is not None:
        yield from _mujoco()


def _gymnasium() -> Iterator[CheckResult]:
    import gymnasium

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # avoids an error about the missing display
    try:
        env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        env.reset(seed=0)
        frame = np.asarray(env.render())
        env.close()
    except Exception as error:  # third-party renderers raise arbitrary exceptions
        yield warning(
            "rendering",
            f"Gymnasium cannot render a frame: {error}",
            "export SDL_VIDEODRIVER=dummy, or pip install --force-reinstall 'lockstep-rl[gym]'",
        )
    else:
        yield ok("rendering", f"Gymnasium renders frames of {frame.shape[1]} x {frame.shape[0]} pixels")


def _mujoco() -> Iterator[CheckResult]:
    backend = os.environ.get("MUJOCO_GL") or headless_backend()
    if backend == "disabled" and "MUJOCO_GL" not in os.environ:
        yield warning(
            "rendering",
            "MuJoCo is installed, but neither EGL nor OSMesa is",
            "apt install libegl1 libgl1-mesa-dri, for EGL; or apt install libosmesa6, for OSMesa",
        )
    elif backend not in ("egl", "osmesa", "glfw", "disabled"):
        yield failure("rendering", f"MUJOCO_GL={backend} is not a rendering backend", "export MUJOCO_GL=egl")
    else:
        yield ok("rendering", f"MuJoCo renders with {backend}")
