"""Tasks of the DeepMind Control Suite by name: loading, stepping, saving and rendering.

The initial state of an episode, including targets in the model, is a function of its seed alone. A task is therefore
restored by starting its episode again and overwriting the physics state.
"""

import copy
import difflib
import importlib
import os
import sys
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import ConfigError
from lockstep.tasks.rendering.opengl import headless_backend, prepare_opengl, render_error

SHORT_NAMES = {"ball_in_cup": "cup", "point_mass": "pointmass"}
"""Short names of domains."""
MT30_SUITE_TASKS = (
    *("walker-stand", "walker-walk", "walker-run", "cheetah-run", "reacher-easy", "reacher-hard", "acrobot-swingup"),
    *("pendulum-swingup", "cartpole-balance", "cartpole-balance-sparse", "cartpole-swingup"),
    *("cartpole-swingup-sparse", "cup-catch", "finger-spin", "finger-turn-easy", "finger-turn-hard", "fish-swim"),
    *("hopper-stand", "hopper-hop"),
)
VARIANTS = (
    *("walker-walk-backwards", "walker-run-backwards", "cheetah-run-backwards", "cheetah-run-front"),
    *("cheetah-run-back", "cheetah-jump", "hopper-hop-backwards", "reacher-three-easy", "reacher-three-hard"),
    *("cup-spin", "pendulum-spin"),
)
"""Tasks that TD-MPC2's authors added to the suite; `tasks/dm_control/extra_tasks.py` rebuilds them."""
SETS = {"mt30": MT30_SUITE_TASKS + VARIANTS}
PIXELS, FRAMES = 64, 3
"""Side of an image observation in pixels, and number of stacked frames."""


class TimeStep(NamedTuple):
    """Result of one action."""

    obs: np.ndarray
    reward: float
    terminated: bool
    ended: bool


class SimulatedTask:
    """One environment. Actions are between -1 and 1, and each is repeated `repeat` times."""

    def __init__(self, name: str, repeat: int, steps: int | None, pixels: bool) -> None:
        self.name, self._repeat, self._pixels = name, repeat, pixels
        self._env = _load(name)
        spec = self._env.action_spec()
        if not (np.isfinite(spec.minimum).all() and np.isfinite(spec.maximum).all()):
            raise ConfigError(f"{name} has unbounded actions.", "Choose another task of the suite.")
        self.actions = int(spec.shape[0])
        self._low, self._high = np.broadcast_to(spec.minimum, spec.shape), np.broadcast_to(spec.maximum, spec.shape)
        self._camera = 2 if name.startswith("quadruped") else 0
        if steps is None and not np.isfinite(self._env._step_limit):
            raise ConfigError(f"{name} has episodes without a limit.", "Set one: --task.episode-length 500.")
        self.length = steps or round(self._env._step_limit / repeat)
        self.taken = 0
        """Actions taken in the current episode."""
        self._frames = np.zeros((0, 3, PIXELS, PIXELS), np.uint8)

    def begin(self, seed: int) -> np.ndarray:
        """Start the episode of a seed and return its first observation."""
        self._env.task.random.seed(seed)
        self.taken = 0
        obs = self._env.reset().observation
        if self._pixels:
            self._frames = np.repeat(self.render(PIXELS, PIXELS).transpose(2, 0, 1)[None], FRAMES, axis=0)
        return self._observe(obs)

    def act(self, action: np.ndarray) -> TimeStep:
        """Take an action, repeated unless the episode ends earlier."""
        scaled = self._low + (np.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (self._high - self._low)
        reward = 0.0
        for _ in range(self._repeat):
            step = self._env.step(scaled)
            reward += step.reward
            if step.last():
                break
        self.taken += 1
        if self._pixels:
            self._frames = np.concatenate([self._frames[1:], self.render(PIXELS, PIXELS).transpose(2, 0, 1)[None]])
        terminated = step.last() and step.discount == 0.0
        return TimeStep(self._observe(step.observation), reward, terminated, step.last() or self.taken >= self.length)

    # State as arrays

    def physics(self) -> np.ndarray:
        """Return the full integration state, float64. `physics.get_state` would omit the solver's warm start."""
        import mujoco

        model, data = self._env.physics.model.ptr, self._env.physics.data.ptr
        state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        return state

    def rng_state(self) -> tuple[np.ndarray, float]:
        """Return the state of the task's random generator: int64 [626], and its cached normal sample."""
        _, keys, position, has_normal, cached_normal = self._env.task.random.get_state()
        return np.concatenate([keys.astype(np.int64), [position, has_normal]]), float(cached_normal)

    def restore(
        self, seed: int, taken: int, physics: np.ndarray, rng_state: np.ndarray, cached_normal: float, obs: np.ndarray
    ) -> None:
        """Restore a saved state in the episode of the seed."""
        import mujoco

        self.begin(seed)
        model, data = self._env.physics.model.ptr, self._env.physics.data.ptr
        mujoco.mj_setState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(model, data)  # recompute derived positions and velocities, which the next step needs
        keys, position, has_normal = rng_state[:624].astype(np.uint32), int(rng_state[624]), int(rng_state[625])
        self._env.task.random.set_state(("MT19937", keys, position, has_normal, cached_normal))
        self.taken = taken
        self._env._step_count = taken * self._repeat
        if self._pixels:
            self._frames = obs.reshape(self._frames.shape).copy()

    def render(self, height: int, width: int) -> np.ndarray:
        """Render an image, uint8 [height, width, 3]."""
        try:
            return np.asarray(self._env.physics.render(height, width, camera_id=self._camera))
        except Exception as error:  # each backend raises its own errors, even AttributeError
            raise render_error(self.name, error) from error

    def close(self) -> None:
        self._env.close()

    def _observe(self, obs: Any) -> np.ndarray:
        if self._pixels:
            return self._frames.reshape(FRAMES * 3, PIXELS, PIXELS)
        return np.concatenate([np.ravel(part) for part in obs.values()]).astype(np.float32)


def resolve(names: tuple[str, ...]) -> tuple[str, ...]:
    """Resolve task names and expand sets such as mt30. Raise with a suggestion for an unknown name."""
    known, resolved = _known(), list[str]()
    for name in names:
        task = name.strip().lower().replace("_", "-").replace("ball-in-cup", "cup").replace("point-mass", "pointmass")
        if task == "mt80":
            raise ConfigError(
                "mt80 needs the 50 tasks of Meta-World, which do not work with the mujoco of the extra dmc (3.17 or "
                "newer): metaworld 3.1.1 requires mujoco 3.3.0, and the tasks of metaworld 3.0.0 fail at their reset.",
                "Use task=mt30, the 30 tasks of the control suite, or name tasks: task=walker-run,cheetah-run.",
            )
        if task not in known and task not in SETS:
            close = difflib.get_close_matches(task, [*known, *SETS], n=1)
            hint = f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(known)}, and the set mt30."
            raise ConfigError(f"the control suite has no task '{name}'.", hint)
        resolved += SETS.get(task, (task,))
    if len(set(resolved)) != len(resolved) or not resolved:
        raise ConfigError(f"{', '.join(names) or 'nothing'} is not a list of different tasks.", "Name each task once.")
    return tuple(resolved)


def _load(name: str) -> Any:
    """Copy the environment that was loaded first, which is much faster than parsing its model again."""
    loaded = _load_once(name)
    physics = loaded.physics.copy(share_model=False)  # episodes write targets into the model
    env = type(loaded)(physics, copy.deepcopy(loaded.task), n_sub_steps=loaded._n_sub_steps)
    env._step_limit = loaded._step_limit
    return env


@cache
def _load_once(name: str) -> Any:
    if name in VARIANTS:
        suite()
        from lockstep.tasks.dm_control.extra_tasks import load_variant

        return load_variant(name)
    domain, task = _known()[name]
    return suite().load(domain, task, task_kwargs={"random": 0})  # seed is unused: every episode sets its own


@cache
def _known() -> dict[str, tuple[str, str]]:
    """Return domain and task of the suite by name."""
    pairs = {f"{SHORT_NAMES.get(domain, domain)}-{task}": (domain, task) for domain, task in suite().ALL_TASKS}
    normalized = {name.lower().replace("_", "-"): pair for name, pair in pairs.items()}
    return normalized | {name: ("", name) for name in VARIANTS}


@cache
def suite() -> Any:
    """Import the suite with a headless rendering backend. MUJOCO_GL takes precedence if the user set it."""
    if "MUJOCO_GL" not in os.environ:
        os.environ["MUJOCO_GL"] = headless_backend()
    prepare_opengl()  # importing the suite loads OpenGL
    try:
        return importlib.import_module("dm_control.suite")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the control suite needs {error.name}.", "pip install 'lockstep-rl[dmc]'") from error
    except Exception:
        if os.environ["MUJOCO_GL"] == "disabled":
            raise
        # The rendering library is installed but finds no device: physics works without it.
        for module in [name for name in sys.modules if name.partition(".")[0] in ("dm_control", "OpenGL")]:
            del sys.modules[module]
        os.environ["MUJOCO_GL"] = "disabled"
        return importlib.import_module("dm_control.suite")
