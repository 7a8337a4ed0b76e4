"""A recipe of your own: `lockstep train examples/tiny_snake.py`."""

from dataclasses import dataclass

from lockstep.algorithms.ppo import PPOConfig
from lockstep.config import Recipe, RunConfig
from lockstep.nets.encoder import EncoderConfig
from lockstep.tasks.snake import SnakeConfig


@dataclass(frozen=True, kw_only=True)
class TinySnake(Recipe):
    """PPO on a board of five by five: sensible after a minute."""

    task: SnakeConfig = SnakeConfig(size=5, num_envs=64)
    algo: PPOConfig = PPOConfig(horizon=32, batch_size=512, encoder=EncoderConfig(width=(16, 32), features=64))
    run: RunConfig = RunConfig(samples=200_000, log_every=20_000, eval_every=100_000)
