"""Scenes to watch of a run: episodes that its policy plays, or sequences of data that it predicts."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from lockstep.base import Dataset, VecEnv
from lockstep.config import ConfigError
from lockstep.inference import LoadedPolicy
from lockstep.lanes import Lanes
from lockstep.protocols import Renderable, TaskConfig


def play_episodes(policy: LoadedPolicy, episodes: int, seed: int, max_steps: int) -> Iterator[Renderable]:
    """Yield the scenes of some episodes, or of some sequences of the test split."""
    scenes = _env_scenes if isinstance(policy.recipe.task, TaskConfig) else _dataset_scenes
    return islice(scenes(policy, episodes, seed), max_steps)


@dataclass
class _EnvScene:
    """Scene of an environment before a step."""

    env: VecEnv
    number: int
    total: float = 0.0
    length: int = 0
    done: bool = False

    def render_text(self) -> str:
        return f"{self.env.render_text(0)}\nstep {self.length}  return {self.total:.2f}"

    def render(self) -> np.ndarray:
        return self.env.render(0)

    @property
    def prefers_image(self) -> bool:
        return self.env.prefers_image

    def result(self) -> str:
        """Return the result of the episode, which includes its last step."""
        ended = "" if self.done else ", not ended"
        return f"episode {self.number}: return {self.total:.2f} in {self.length} steps{ended}"


def _env_scenes(policy: LoadedPolicy, episodes: int, seed: int) -> Iterator[Renderable]:
    """Play one environment, which resets itself when an episode ends."""
    config = replace(policy.recipe.task, num_envs=1)
    env: VecEnv = config.build(Lanes(1, range(1), seed), torch.device("cpu"))
    with closing(env):
        obs = env.reset()
        for number in range(1, episodes + 1):
            policy.reset()
            scene = _EnvScene(env, number)
            while not scene.done:
                yield scene
                step = env.step(torch.from_numpy(policy.act(obs)))
                obs, scene.done = step.obs, bool(step.terminated[0] or step.truncated[0])
                scene.total, scene.length = scene.total + float(step.reward[0]), scene.length + 1


def _dataset_scenes(policy: LoadedPolicy, episodes: int, seed: int) -> Iterator[Renderable]:
    """Play sequences of the test split, starting at number `seed - 1`. The dataset puts the best examples first."""
    data: Dataset = policy.recipe.task.build(Lanes(1, range(1), seed), torch.device("cpu"))
    if not hasattr(data, "playback"):
        message = f"{type(data).__name__} has nothing to watch: it has no method `playback`."
        raise ConfigError(message, "Evaluate its predictions with lockstep eval, or add a method `playback`.")
    with closing(data):
        for number in range(seed - 1, seed - 1 + episodes):
            yield from data.playback("test", number, lambda rows: policy.act(data.read("test", rows)["inputs"]))
