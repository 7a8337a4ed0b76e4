"""Scenes to watch of a run: episodes that its policy plays, or sequences of data that it predicts."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch

from lockstep.base import Dataset, VecEnv
from lockstep.config import ConfigError
from lockstep.evaluation import select_split
from lockstep.inference import LoadedPolicy
from lockstep.lanes import Lanes
from lockstep.protocols import Renderable, Split, Step, TaskConfig
from lockstep.pytree import tree_map
from lockstep.tools.play.caption import add_caption


def play_episodes(
    policy: LoadedPolicy, episodes: int, seed: int, max_steps: int, split: Split = "test"
) -> Iterator[Renderable]:
    """Yield the scenes of some episodes, or of some sequences of a data set, on a part of the data."""
    scenes = _env_scenes if isinstance(policy.recipe.task, TaskConfig) else _dataset_scenes
    return islice(scenes(policy, episodes, seed, split), max_steps)


END_FRAMES = 12
"""How often the last frame of an episode is repeated, so that its result can be read."""


class _EnvScene:
    """Scene of an environment before a step.

    The environment resets itself when the episode ends. The end therefore shows the last scene that was rendered, with
    the result.
    """

    def __init__(self, env: VecEnv, number: int) -> None:
        self.env, self.number, self.total, self.length = env, number, 0.0, 0
        self.ended = False
        self._title, self._score = env.render_title(0), ""
        self._text, self._image = "", np.zeros((1, 1, 3), np.uint8)

    def advance(self, step: Step) -> None:
        """Record a step that the environment has taken. The agents of a game end together, and their returns add up."""
        self.total, self.length = self.total + float(step.reward.sum()), self.length + 1
        self.ended = bool((step.terminated | step.truncated).all())
        if self.ended:
            found = {name: values[~values.isnan()].tolist() for name, values in step.episode_info.items()}
            self._score = self.env.render_result({name: values[0] for name, values in found.items() if values})

    def render_text(self) -> str:
        if not self.ended:
            self._text = self.env.render_text(0)
        return "\n".join([self._text, *self._caption()])

    def render(self) -> np.ndarray:
        return add_caption(self._render_env(), self._caption())

    def terminal_image(self) -> np.ndarray | None:
        """Return the image to show above the text in a terminal. None: the text is enough."""
        return self._render_env() if self.env.prefers_image else None

    def result(self) -> str:
        """Return the result of the episode, which includes its last step."""
        end = f"  {self._score}".rstrip() if self.ended else ", not ended"
        return f"episode {self.number}: return {self.total:.2f} in {self.length} steps{end}"

    def _render_env(self) -> np.ndarray:
        if not self.ended:
            self._image = self.env.render(0)
        return self._image

    def _caption(self) -> list[str]:
        if not self.ended:
            self._score = self.env.render_score(0)
        progress = f"step {self.length}  return {self.total:.2f}  {self._score}".rstrip()
        return [self._title, progress] if self._title else [progress]


def _env_scenes(policy: LoadedPolicy, episodes: int, seed: int, split: Split) -> Iterator[Renderable]:
    """Play one environment, or all agents of one game, which resets itself when an episode ends."""
    config: Any = select_split(policy.recipe.task, split)
    config = replace(config, num_envs=getattr(config, "rows_per_game", 1))
    env: VecEnv = config.build(Lanes(1, range(1), seed), torch.device("cpu"))
    with closing(env):
        obs = env.reset()
        for number in range(1, episodes + 1):
            policy.reset()
            scene = _EnvScene(env, number)
            while not scene.ended:
                yield scene
                step = env.step(policy.act_batch(tree_map(lambda x: x.to(policy.device), obs)).cpu())
                obs = step.obs
                scene.advance(step)
            yield from repeat(scene, END_FRAMES)


def _dataset_scenes(policy: LoadedPolicy, episodes: int, seed: int, split: Split) -> Iterator[Renderable]:
    """Play sequences of a split, starting at number `seed - 1`. The dataset puts the best examples first."""
    data: Dataset = policy.recipe.task.build(Lanes(1, range(1), seed), torch.device("cpu"))
    if not hasattr(data, "playback"):
        message = f"{type(data).__name__} has nothing to watch: it has no method `playback`."
        raise ConfigError(message, "Evaluate its predictions with lockstep eval, or add a method `playback`.")
    with closing(data):
        for number in range(seed - 1, seed - 1 + episodes):
            yield from data.playback(split, number, lambda rows: policy.act(data.read(split, rows)["inputs"]))
