"""The work that figures are given for: PPO on Snake 8x8, 64 boards, 128 steps, batches of 2,048, four epochs."""

from lockstep.config import overlay
from lockstep.recipes.snake_ppo import SnakePPO

CNN = {"task.size": 8, "task.num_envs": 64, "algo.horizon": 128, "algo.batch_size": 2048, "algo.epochs": 4}
MLP = CNN | {
    "algo.encoder.kind": "mlp",
    "algo.encoder.shared": True,
    "algo.encoder.width": (128,),
    "algo.encoder.depth": 2,
}


def recipe(settings, **more):
    """The recipe with some settings; `run_precision="bf16"` stands for `run.precision`."""
    return overlay(SnakePPO(), settings | {name.replace("_", ".", 1): value for name, value in more.items()})
