"""The work that figures are given for: PPO on Snake 8x8, 64 boards, 128 steps, batches of 2,048, four epochs.

And how a script starts itself again on several processes.
"""

import os
import subprocess
import sys

from lockstep.config import apply_overrides
from lockstep.recipes.snake_ppo import SnakePPO

CNN = {"task.size": 8, "task.num_envs": 64, "algo.rollout_steps": 128, "algo.batch_size": 2048, "algo.epochs": 4}
MLP = CNN | {
    "algo.encoder.kind": "mlp",
    "algo.encoder.share_encoder": True,
    "algo.encoder.hidden_sizes": (128,),
    "algo.encoder.num_layers": 2,
}


def recipe(settings, **more):
    """The recipe with some settings; `run_precision="bf16"` stands for `run.precision`."""
    return apply_overrides(SnakePPO(), settings | {name.replace("_", ".", 1): value for name, value in more.items()})


def started():
    """Whether this is one of the processes that `start_again` started."""
    return "RANK" in os.environ


def start_again(processes):
    """Run this script, with its flags, on several processes of one thread each."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    subprocess.run([sys.executable, *launcher, *sys.argv], env=environment, check=True)
