"""What vector environments gain: steps per CPU second of Pong with the standard preprocessing, in Python and in ale-py.

pip install 'lockstep-rl[atari]' opencv-python-headless
python benchmarks/gym_vector.py
"""

import os
import statistics
import time

import gymnasium

ENVS, ROUNDS, STEPS = 8, 5, 250


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from lockstep.lanes import Lanes
    from lockstep.tasks.gym.env import GymConfig

    gymnasium.register("Preprocessed-v0", preprocessed)
    cases = {
        "single, raw frames": (GymConfig(id="ALE/Pong-v5", num_envs=ENVS, vectorization_mode="sync"), 8),
        "single, AtariPreprocessing": (GymConfig(id="Preprocessed-v0", num_envs=ENVS), 8),
        "vector, 8 lanes": (GymConfig(id="ALE/Pong-v5", num_envs=ENVS), 8),
        "vector, 1 lane": (GymConfig(id="ALE/Pong-v5", num_envs=ENVS), 1),
    }
    built = {name: config.build(Lanes(n, range(n), 0), torch.device("cpu")) for name, (config, n) in cases.items()}
    actions = torch.randint(6, (STEPS, ENVS), generator=torch.Generator().manual_seed(0))
    cpu, wall = {name: [] for name in built}, {name: [] for name in built}
    for _ in range(ROUNDS):  # interleaved, so that all meet the same load of the machine
        for name, envs in built.items():
            start = time.process_time(), time.perf_counter()  # the first counts all threads
            for action in actions:
                envs.step(action)
            cpu[name].append(STEPS * ENVS / (time.process_time() - start[0]))
            wall[name].append(STEPS * ENVS / (time.perf_counter() - start[1]))
    print(f"ALE/Pong-v5, {ENVS} environments; median of {ROUNDS} rounds of {STEPS} steps\n")
    print("| environments | steps per CPU second | steps/s |")
    print("| --- | ---: | ---: |")
    for name, envs in built.items():
        print(f"| {name} | {statistics.median(cpu[name]):,.0f} | {statistics.median(wall[name]):,.0f} |")
        envs.close()


def preprocessed(frameskip: int = 1, **kwargs) -> gymnasium.Env:
    env = gymnasium.make("ALE/Pong-v5", frameskip=frameskip, **kwargs)  # AtariPreprocessing skips the frames
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


if __name__ == "__main__":
    main()
