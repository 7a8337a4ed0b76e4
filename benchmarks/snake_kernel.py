"""Steps per second of the compiled Snake alone, on one core, by the number of boards.

python benchmarks/snake_kernel.py
"""

import statistics
import time

import numpy as np
import torch

from lockstep.lanes import Lanes
from lockstep.tasks.snake.env import SnakeConfig


def main(steps=400, rounds=9):
    for boards in (64, 1024, 8192):
        task = SnakeConfig(size=12, num_envs=boards).build(Lanes(8, range(8), 0), torch.device("cpu"))
        actions = np.random.default_rng(0).integers(0, 4, (steps, boards))
        task.step_numpy(actions[0])
        speeds = []
        for _ in range(rounds):
            began = time.process_time()
            for action in actions:
                task.step_numpy(action)
            speeds.append(steps * boards / (time.process_time() - began))
        print(f"{boards:>6,} boards of 12x12: {statistics.median(speeds) / 1e6:.1f}M steps a CPU second")


if __name__ == "__main__":
    main()
