"""PPO on CartPole and on Pong: Lockstep, Stable-Baselines3 and a single-file loop, with the environments each can use.

pip install 'lockstep-rl[atari]' opencv-python-headless stable-baselines3 envpool
python benchmarks/peers/gym_training.py
python benchmarks/peers/gym_training.py --work cartpole --rounds 9

All contenders train in one process with the same network, batches and epochs, in turns, on one thread. Contenders of
packages that are not installed are skipped. `../gym_vector.py` measures the environments without training.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from pathlib import Path

import gymnasium

sys.path.append(str(Path(__file__).parents[1]))
import gym_vector

ENVS, STEPS, BATCH = 8, 32, 128
EPOCHS, ITERATIONS = {"cartpole": 10, "pong": 2}, {"cartpole": 4, "pong": 1}
"""Epochs, and iterations of a turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=[*ITERATIONS], default=[*ITERATIONS])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    gymnasium.register("PreprocessedPong-v0", gym_vector.preprocessed_pong)
    gymnasium.register("PoolPong-v0", vector_entry_point=gym_vector.pool_pong)
    gymnasium.register("PoolCartPole-v1", vector_entry_point=gym_vector.pool_cartpole)
    for work in args.work:
        measure(work, args.rounds)


def measure(work, rounds) -> None:
    """Print the training steps per CPU second of all contenders."""
    trained, parameters = {}, {}
    for name, (package, make) in CONTENDERS[work].items():
        if importlib.util.find_spec(package):
            trained[name], parameters[name] = make(work)
    if len({*parameters.values()}) > 1:
        raise SystemExit(f"the networks have {parameters} parameters: not equal work")
    iterations, rates = ITERATIONS[work], {name: [] for name in trained}
    for round in range(rounds + 1):
        for name, train in trained.items():
            start = time.process_time()
            train(iterations)
            if round:  # the first one warms up
                rates[name].append(iterations * ENVS * STEPS / (time.process_time() - start))
    present = next(iter(rates.values()))
    print(f"\n{work}: {ENVS} environments x {STEPS} steps, batches of {BATCH}, {EPOCHS[work]} epochs,", end=" ")
    print(f"{next(iter(parameters.values())):,} parameters; median of {rounds} rounds\n")
    print("| PPO | training steps per CPU second | ratio to the first row |")
    print("| --- | ---: | ---: |")
    for name, values in rates.items():
        ratio = statistics.median(value / other for value, other in zip(values, present, strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.2f} |", flush=True)


def lockstep_ppo(id):
    def make(work):
        import single_file_ppo as ppo
        from lockstep_peer import Loop
        from workload import count_parameters

        from lockstep.config import apply_overrides
        from lockstep.recipes.gym_ppo import GymPPO

        settings = {
            "task": {"id": id, "num_envs": ENVS},
            "algo": {
                **{"rollout_steps": STEPS, "batch_size": BATCH, "epochs": EPOCHS[work], "learning_rate": ppo.RATE},
                **{"gamma": ppo.GAMMA, "gae_lambda": ppo.LAMBDA, "clip_coef": ppo.CLIP, "entropy_coef": ppo.ENTROPY},
                **{"value_coef": 2 * ppo.VALUE, "max_grad_norm": ppo.MAX_NORM},  # the loss halves the squared error
            },
            "algo.encoder": {"kind": "nature", "out_features": 512} if work == "pong" else {"kind": "mlp"},
            "run": {"total_samples": 10**12, "device": "cpu"},
        }
        loop = Loop(apply_overrides(GymPPO(), settings))

        def train(iterations):
            for _ in range(iterations):
                loop.iterate()

        return train, count_parameters(loop.algorithm.net)

    return make


def single_file(make_envs):
    def make(work):
        from single_file_ppo import MLPAgent, NatureAgent, SingleFilePPO
        from workload import count_parameters

        agent = NatureAgent(6) if work == "pong" else MLPAgent(4, 2)
        loop = SingleFilePPO(make_envs(), agent, ENVS, STEPS, BATCH, EPOCHS[work])

        def train(iterations):
            for _ in range(iterations):
                loop.iterate()

        return train, count_parameters(agent)

    return make


def stable_baselines3(make_envs, policy):
    def make(work):
        import single_file_ppo as ppo
        from stable_baselines3 import PPO
        from workload import count_parameters

        model = PPO(
            policy,
            make_envs(),
            **{"n_steps": STEPS, "batch_size": BATCH, "n_epochs": EPOCHS[work], "learning_rate": ppo.RATE},
            **{"gamma": ppo.GAMMA, "gae_lambda": ppo.LAMBDA, "clip_range": ppo.CLIP, "ent_coef": ppo.ENTROPY},
            **{"vf_coef": ppo.VALUE, "max_grad_norm": ppo.MAX_NORM, "device": "cpu", "seed": 0},
        )

        def train(iterations):
            model.learn(iterations * ENVS * STEPS, log_interval=None, reset_num_timesteps=False)

        return train, count_parameters(model.policy)

    return make


CONTENDERS = {
    "cartpole": {
        "Lockstep, single": ("gymnasium", lockstep_ppo("CartPole-v1")),
        "Lockstep, EnvPool": ("envpool", lockstep_ppo("PoolCartPole-v1")),
        "Stable-Baselines3": ("stable_baselines3", stable_baselines3(gym_vector.sb3_cartpole_envs, "MlpPolicy")),
        "single-file loop, SyncVectorEnv": ("gymnasium", single_file(gym_vector.sync_cartpole)),
        "single-file loop, EnvPool": ("envpool", single_file(lambda: gym_vector.pool_cartpole(ENVS))),
    },
    "pong": {
        "Lockstep, single": ("ale_py", lockstep_ppo("PreprocessedPong-v0")),
        "Lockstep, AtariVectorEnv": ("ale_py", lockstep_ppo("ALE/Pong-v5")),
        "Lockstep, EnvPool": ("envpool", lockstep_ppo("PoolPong-v0")),
        "Stable-Baselines3": ("stable_baselines3", stable_baselines3(gym_vector.sb3_pong_envs, "CnnPolicy")),
        "single-file loop, SyncVectorEnv": ("ale_py", single_file(gym_vector.sync_pong)),
        "single-file loop, EnvPool": ("envpool", single_file(lambda: gym_vector.pool_pong(ENVS))),
    },
}


if __name__ == "__main__":
    main()
