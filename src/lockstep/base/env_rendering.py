"""What a task may implement so that `play` can show it. Everything here is optional."""

import math
from collections.abc import Mapping

import numpy as np

from lockstep.config import ConfigError


class EnvRendering:
    """Rendering of one environment of a `VecEnv`, by its local index."""

    prefers_image: bool = False
    """Whether `play` also shows the image in a terminal with 24-bit color, because `render_text` lists only numbers."""

    def render_text(self, env: int) -> str:
        """Return one environment as characters, for the terminal."""
        raise ConfigError(f"{type(self).__name__} does not render as text.", "Implement render_text(env).")

    def render(self, env: int) -> np.ndarray:
        """Return one environment as an image, uint8 [height, width, 3]."""
        raise ConfigError(f"{type(self).__name__} does not render as an image.", "Implement render(env).")

    def render_title(self, env: int) -> str:
        """Return what an environment plays, for videos: task, opponent or symbol. Constant during an episode."""
        return ""

    def render_score(self, env: int) -> str:
        """Return the score of the episode so far, for videos, if the return alone does not tell it."""
        return ""

    def render_result(self, info: Mapping[str, float]) -> str:
        """Return the result of an ended episode, for videos, from its row of `Step.episode_info`."""
        return "  ".join(f"{name} {value:.4g}" for name, value in info.items() if not math.isnan(value))
