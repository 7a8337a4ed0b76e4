"""Lockstep's own PPO at the common work, with what its loop does around an iteration: pooled metrics and the check.

python benchmarks/peers/lockstep_peer.py --net cnn --steps 32768 [--precision bf16]
"""

import work

import lockstep
from lockstep.config import overlay
from lockstep.protocols import Clock
from lockstep.recipes.snake_ppo import SnakePPO
from lockstep.runtime import Runtime
from lockstep.runtime.place import keep_freed_memory
from lockstep.train import iterate

NETS = {
    "cnn": {"width": [32, 64], "depth": 3, "features": 256},
    "mlp": {"kind": "mlp", "shared": True, "width": [128], "depth": 2},
}


class Loop:
    """A recipe being trained in this process, an iteration at a time."""

    def __init__(self, recipe):
        keep_freed_memory()  # as every run of ours does when it starts
        self.config = recipe.run
        self.runtime = Runtime.alone(recipe.run)
        self.task = recipe.task.build(self.runtime.lanes, self.runtime.device)
        self.algorithm = recipe.algo.build(self.task, self.runtime)
        self.clock = Clock(budget=recipe.run.samples)

    def iterate(self):
        iterate(self.task, self.algorithm, self.clock, self.runtime, self.config.check_every)


def recipe(net, precision):
    return overlay(
        SnakePPO(),
        {
            "task": {"size": work.SIZE, "num_envs": work.ENVS},
            "algo": {
                "horizon": work.HORIZON,
                "batch_size": work.BATCH,
                "epochs": work.EPOCHS,
                "gamma": work.GAMMA,
                "gae_lambda": work.LAMBDA,
                "clip": work.CLIP,
                "entropy_weight": work.ENTROPY,
                "value_weight": 2 * work.VALUE,  # lockstep halves the squared error once more
                "max_grad_norm": work.MAX_NORM,
                "learning_rate": work.RATE,
                "adam_epsilon": work.EPSILON,
                "encoder": NETS[net],
            },
            "run": {"precision": precision, "samples": 10**12},
        },
    )


def main():
    args = work.arguments(precision={"choices": ("fp32", "bf16"), "default": "fp32"})
    loop = Loop(recipe(args.net, args.precision))

    def train(iterations):
        for _ in range(iterations):
            loop.iterate()

    name = "Lockstep" if args.precision == "fp32" else f"Lockstep {args.precision}"
    work.measure(name, lockstep.__version__, args, work.count_parameters(loop.algorithm.net), train)


if __name__ == "__main__":
    main()
