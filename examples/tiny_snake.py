"""A recipe of your own: `lockstep train examples/tiny_snake.py`."""

from dataclasses import dataclass

from lockstep import PPOConfig, Recipe, RunConfig, SnakeConfig
from lockstep.nn.encoders import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class TinySnake(Recipe):
    """PPO on a board of five by five: sensible after a minute."""

    task: SnakeConfig = SnakeConfig(size=5, num_envs=64)
    algo: PPOConfig = PPOConfig(
        rollout_steps=32, batch_size=512, encoder=EncoderConfig(hidden_sizes=(16, 32), out_features=64)
    )
    run: RunConfig = RunConfig(total_samples=200_000, log_every=20_000, eval_every=100_000)
