"""Making of vector environments (`gymnasium.vector.VectorEnv`) by their class or by the vector entry point of an id."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Literal

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode

from lockstep.config import ConfigError
from lockstep.tasks.gym.env_class import find_env
from lockstep.tasks.gym.vector_masks import VectorActionMask, has_vector_mask
from lockstep.tasks.gym.vector_obs import is_image

VectorizationMode = Literal["auto", "sync", "vector_entry_point"]
ATARI_EVALUATION = {"reward_clipping": False, "episodic_life": False}
"""Arguments of `AtariVectorEnv` for evaluations: whole games with their own score."""


class VectorMaker:
    """Makes vector environments with any number of environments."""

    def __init__(self, id: str, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
        self.id = id
        self._create = _entry_point(spec)
        self._parameters = inspect.signature(self._create).parameters
        self.is_atari = getattr(self._create, "__module__", "") == "ale_py.vector_env"
        self._kwargs = {**spec.kwargs, **kwargs}
        if spec.max_episode_steps is not None:
            self._kwargs.setdefault("max_episode_steps", spec.max_episode_steps)  # as gymnasium.make_vec does
        if self.takes("autoreset_mode"):
            self._kwargs.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
        if self.is_atari:
            self._kwargs.setdefault("num_threads", 1)  # the instances of the lanes run in parallel

        self.has_mask = False
        if not self.is_atari:  # it has no masks, and its reset loads the game
            with closing(self(1)) as env:
                self.has_mask = has_vector_mask(env)
        with closing(self(1)) as env:
            self.observation_space: Space[Any] = env.single_observation_space
            self.action_space: Space[Any] = env.single_action_space
            mode = env.metadata.get("autoreset_mode")
            self.autoreset_mode = None if mode is None else AutoresetMode(mode)
            self.renders = "rgb_array" in (env.metadata.get("render_modes") or []) and self.takes("render_mode")
        if self.renders:
            self._kwargs.setdefault("render_mode", "rgb_array")  # costs nothing until a frame is rendered

    def takes(self, name: str) -> bool:
        """Return whether the entry point has a parameter of that name."""
        return name in self._parameters

    def describe(self) -> tuple[dict[str, Any], list[str], Space[Any], Space[Any], int | None]:
        """Return no options, the render modes, the observation and action spaces, and the step limit."""
        if not isinstance(self.action_space, Box | Discrete | MultiDiscrete):
            raise ConfigError(
                f"the vector environment of {self.id} has actions of {self.action_space}.",
                "Use --task.vectorization-mode sync.",
            )
        modes = ["rgb_array"] if self.renders or is_image(self.observation_space) else []
        return {}, modes, self.observation_space, self.action_space, self._kwargs.get("max_episode_steps")

    def __call__(self, num_envs: int, seed: int | None = None) -> Any:
        """Make a vector environment. `seed` is an argument of the entry point, not of a reset."""
        seeding = {} if seed is None else {"seed": seed}
        env = self._create(num_envs=num_envs, **{**self._kwargs, **seeding})
        return VectorActionMask(env, self.id) if self.has_mask else env


def evaluation_kwargs(id: str, mode: VectorizationMode, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ in evaluations."""
    if not id.startswith("ALE/") or mode == "sync":
        return {}
    spec = _find_spec(id)
    return {**ATARI_EVALUATION} if spec and spec.vector_entry_point and _takes_all(spec, kwargs) else {}


def find_vector_maker(
    id: str, mode: VectorizationMode, kwargs: Mapping[str, Any], single: str = "", workers: int = 0
) -> VectorMaker | None:
    """Return a maker of vector environments, or None if single environments are to be made.

    `auto` uses a vector entry point only if nothing is lost by it: if it takes all arguments, and if the environments
    of a lane can be stepped together. With autoreset in the next step they cannot.

    Args:
        single: Flag of a setting that needs single environments, if one does.
        workers: Worker processes, which step single environments only.
    """
    if mode == "sync":
        return None
    spec = _find_spec(id)
    if spec is None or spec.vector_entry_point is None:
        if mode == "auto" or spec is None:
            return None
        raise ConfigError(
            f"task.vectorization_mode is {mode}, but {id} has no vector entry point.",
            "Use --task.vectorization-mode auto, or register it with vector_entry_point=CLASS.",
        )
    optional = mode == "auto" and spec.entry_point is not None
    if optional and (single or not _takes_all(spec, kwargs)):
        return None
    maker = VectorMaker(id, spec, kwargs)
    if optional and maker.autoreset_mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        return None
    if maker.autoreset_mode is None:
        raise ConfigError(
            f"{id} does not say how its environments are reset when an episode ends.",
            "Set metadata['autoreset_mode'] of the vector environment to AutoresetMode.SAME_STEP, and return the last "
            "observations in info['final_obs'].",
        )
    if single or workers:
        setting = single or "--task.num-workers"
        raise ConfigError(
            f"{setting} needs single environments, but {id} is a vector environment.",
            f"Remove {setting}, or use --task.vectorization-mode sync.",
        )
    return maker


def _find_spec(id: str) -> EnvSpec | None:
    found = find_env(id)
    return found if isinstance(found, EnvSpec) else gymnasium.registry.get(found)


def _entry_point(spec: EnvSpec) -> Callable[..., Any]:
    entry_point: Any = spec.vector_entry_point
    create: Callable[..., Any] = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return create


def _takes_all(spec: EnvSpec, kwargs: Mapping[str, Any]) -> bool:
    parameters = inspect.signature(_entry_point(spec)).parameters
    return kwargs.keys() <= parameters.keys() or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
