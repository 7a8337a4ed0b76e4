"""What worker processes gain: steps a second with 0, 1 and 2 of them, for a quick environment and for a slow one.

python benchmarks/gym_workers.py
"""

import os
import statistics
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

ENVS, WORKERS, ROUNDS, SECONDS = 16, (0, 1, 2), 7, 1.0


class Slow(gymnasium.Env):
    """About a millisecond of plain Python a step."""

    observation_space = Box(-1, 1, (8,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(8, np.float32), {}

    def step(self, action):
        total = 0
        for number in range(14_000):
            total += number * action
        return np.full(8, total % 2, np.float32), 1.0, False, False, {}


if "Slow-v0" not in gymnasium.registry:  # as a script and, for its name, as a module
    gymnasium.register("Slow-v0", Slow, max_episode_steps=500)


def main() -> None:
    # After the environment, because the workers import this file for it and need nothing else.
    import torch

    from lockstep.lanes import Lanes
    from lockstep.tasks.gym.env import GymConfig

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    actions = torch.ones(ENVS, dtype=torch.int64)
    print(f"{ENVS} environments, {os.cpu_count()} cores; median of {ROUNDS} interleaved rounds of {SECONDS:.0f} s\n")
    print("| environment | workers | steps/s | to 0 workers | us a batch | started in |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for id in ("CartPole-v1", "gym_workers:Slow-v0"):
        crews, started = {}, {}
        for workers in WORKERS:
            start = time.perf_counter()
            config = GymConfig(id=id, num_envs=ENVS, num_workers=workers)
            crews[workers] = config.build(Lanes(8, range(8), 0), torch.device("cpu"))
            crews[workers].reset()
            started[workers] = time.perf_counter() - start
        rates = {workers: [] for workers in WORKERS}
        for _ in range(ROUNDS):
            for workers, envs in crews.items():
                rates[workers].append(rate(envs, actions))
        for workers, envs in crews.items():
            median = statistics.median(rates[workers])
            # Side by side in each round, so that what else the machine does falls out of the ratio.
            ratio = statistics.median(r / base for r, base in zip(rates[workers], rates[0], strict=True))
            batch = 1e6 * ENVS / median
            print(f"| {id} | {workers} | {median:,.0f} | {ratio:.2f} | {batch:,.0f} | {started[workers]:.2f} s |")
            envs.close()


def rate(envs, actions) -> float:
    """Environment steps a second."""
    batches, start = 0, time.perf_counter()
    while time.perf_counter() < start + SECONDS:
        envs.step(actions)
        batches += 1
    return batches * ENVS / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
