"""Rendering of MuJoCo without a display: choice of a backend, and errors with a fix."""

import os

import gymnasium
import pytest
import torch

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.rendering import opengl


def fail(module, error):
    """Raise an error in a function of a module with that name."""
    namespace = {"__name__": module, "error": error}
    exec("def create_context():\n    raise error", namespace)
    namespace["create_context"]()


@pytest.mark.parametrize("libraries", [("EGL", "OSMesa"), ("OSMesa",), ()])
def test_render_backend_is_chosen_by_available_libraries(monkeypatch, libraries):
    monkeypatch.setattr(opengl.sys, "platform", "linux")
    monkeypatch.setattr(opengl.ctypes.util, "find_library", lambda name: name in libraries or None)
    assert opengl.headless_backend() == (libraries[0].lower() if libraries else "disabled")


def test_opengl_error_names_variable_and_package(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(ConfigError) as caught, opengl.convert_opengl_errors("Hopper-v5"):
        fail("OpenGL.raw", AttributeError("no glGetError"))
    assert "Hopper-v5 cannot be rendered here (MUJOCO_GL=glfw): no glGetError" in str(caught.value)
    for words in ("apt install libegl1", "MUJOCO_GL=egl", "apt install libosmesa6", "MUJOCO_GL=osmesa"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("module", "error"), [("my_env", ValueError("a bug")), ("mujoco.egl", ModuleNotFoundError("imageio"))]
)
def test_other_errors_are_not_converted(module, error):
    with pytest.raises(type(error)) as caught, opengl.convert_opengl_errors("Hopper-v5"):
        fail(module, error)
    assert caught.value is error


class Robot(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)
    mujoco_renderer = None

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        return self.observation_space.low, {}

    def render(self):
        fail("mujoco.egl", RuntimeError(f"no device for {os.environ.get('MUJOCO_GL')}"))


gymnasium.register("LockstepRobot-v0", Robot)


@pytest.mark.parametrize(("user", "used"), [("", "osmesa"), ("glfw", "glfw")])
def test_gym_env_of_mujoco_renders_with_headless_backend(monkeypatch, user, used):
    monkeypatch.setenv("MUJOCO_GL", user)  # restored after the test
    if not user:
        del os.environ["MUJOCO_GL"]
    monkeypatch.setattr("lockstep.tasks.gym.sync_envs.headless_backend", lambda: "osmesa")
    envs = GymConfig(id="LockstepRobot-v0", num_envs=1).build(Lanes(1, range(1), 0), torch.device("cpu"))
    with pytest.raises(ConfigError, match=rf"LockstepRobot-v0 cannot be rendered here .* no device for {used}"):
        envs.render(0)
