"""Lockstep's own PPO at the common work, with what its loop does around an iteration: pooled metrics and the check.

python benchmarks/peers/lockstep_peer.py --net cnn --steps 32768 [--precision bf16]
"""

import workload

import lockstep
from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.launch.device import disable_malloc_trim
from lockstep.recipes.snake_ppo import SnakePPO
from lockstep.training_loop import iterate

NETS = {
    "cnn": {"hidden_sizes": [32, 64], "num_layers": 3, "out_features": 256},
    "mlp": {"kind": "mlp", "share_encoder": True, "hidden_sizes": [128], "num_layers": 2},
}


class Loop:
    """A recipe being trained in this process, an iteration at a time."""

    def __init__(self, recipe):
        disable_malloc_trim()  # as every run of ours does when it starts
        self.config = recipe.run
        self.runtime = Runtime.single_process(recipe.run)
        self.task = recipe.task.build(self.runtime.lanes, self.runtime.device)
        self.algorithm = recipe.algo.build(self.task, self.runtime)
        self.clock = TrainState(total_samples=recipe.run.total_samples)

    def iterate(self):
        iterate(self.task, self.algorithm, self.clock, self.runtime, self.config.replica_check_every)


def recipe(net, precision):
    return apply_overrides(
        SnakePPO(),
        {
            "task": {"size": workload.SIZE, "num_envs": workload.ENVS},
            "algo": {
                "rollout_steps": workload.HORIZON,
                "batch_size": workload.BATCH,
                "epochs": workload.EPOCHS,
                "gamma": workload.GAMMA,
                "gae_lambda": workload.LAMBDA,
                "clip_coef": workload.CLIP,
                "entropy_coef": workload.ENTROPY,
                "value_coef": 2 * workload.VALUE,  # lockstep halves the squared error once more
                "max_grad_norm": workload.MAX_NORM,
                "learning_rate": workload.RATE,
                "adam_eps": workload.EPSILON,
                "encoder": NETS[net],
            },
            "run": {"precision": precision, "total_samples": 10**12},
        },
    )


def main():
    args = workload.arguments(precision={"choices": ("fp32", "bf16"), "default": "fp32"})
    loop = Loop(recipe(args.net, args.precision))

    def train(iterations):
        for _ in range(iterations):
            loop.iterate()

    name = "Lockstep" if args.precision == "fp32" else f"Lockstep {args.precision}"
    workload.measure(name, lockstep.__version__, args, workload.count_parameters(loop.algorithm.net), train)


if __name__ == "__main__":
    main()
