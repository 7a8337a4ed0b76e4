"""Steps per CPU second of vector environments and simulators: Lockstep's ways to step them, and those of others.

pip install 'lockstep-rl[atari]' opencv-python-headless stable-baselines3 envpool
python benchmarks/gym_vector.py
python benchmarks/gym_vector.py --work cartpole simulator --rounds 9

Contenders of packages that are not installed are skipped. All of them take the same random actions on one thread.
`peers/gym_training.py` compares training.
"""

import argparse
import importlib.util
import os
import statistics
import time

import gymnasium
import numpy as np

ENVS, MASSES = 8, 256
ATARI = {"frameskip": 1, "repeat_action_probability": 0.25}
"""Arguments of a single Atari environment whose frames a wrapper skips."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORK, default=[*WORK])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    gymnasium.register("PreprocessedPong-v0", preprocessed_pong)
    gymnasium.register("PoolPong-v0", vector_entry_point=pool_pong)
    gymnasium.register("PoolCartPole-v1", vector_entry_point=pool_cartpole)
    gymnasium.register("PointMass-v0", PointMassEnv, max_episode_steps=32)
    for work in args.work:
        measure(work, *WORK[work], args.rounds)


def measure(work, contenders, envs, steps, draw, rounds) -> None:
    """Print the steps per CPU second of all contenders of one kind of work."""
    steppers = {name: make() for name, (package, make) in contenders.items() if importlib.util.find_spec(package)}
    actions = draw(np.random.default_rng(0), (steps, envs))
    rates = {name: [] for name in steppers}
    for round in range(rounds + 1):
        for name, step in steppers.items():  # interleaved, so that all meet the same load of the machine
            start = time.process_time()  # counts all threads
            for action in actions:
                step(action)
            if round:  # the first one warms up
                rates[name].append(steps * envs / (time.process_time() - start))
    present = rates[next(iter(rates))]
    print(f"\n{work}: {envs} environments; median of {rounds} rounds of {steps} steps\n")
    print("| environments | steps per CPU second | ratio to the first row |")
    print("| --- | ---: | ---: |")
    for name, values in rates.items():
        # Of each round, so that changes in the speed of the machine cancel out.
        ratio = statistics.median(value / other for value, other in zip(values, present, strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.2f} |", flush=True)


# Contenders. Each is made by a function that returns its step.


def gym_task(id, lanes=8, num_envs=ENVS, **settings):
    def make():
        from lockstep.tasks.gym.env import GymConfig

        return task_step(GymConfig(id=id, num_envs=num_envs, **settings), lanes)

    return make


def simulator_task(lanes):
    def make():
        from lockstep.tasks.simulators.env import SimulatorConfig

        return task_step(SimulatorConfig(num_envs=MASSES), lanes)

    return make


def task_step(config, lanes):
    import torch

    from lockstep.lanes import Lanes

    task = config.build(Lanes(lanes, range(lanes), 0), torch.device("cpu"))
    task.reset()
    return lambda action: task.step(torch.from_numpy(action))


def bare_simulator():
    import torch

    from lockstep.tasks.simulators.point_mass import make_env

    simulator = make_env(MASSES)
    return lambda action: simulator.step(torch.from_numpy(action))


def vector(make):
    """A vector environment without Lockstep: of Gymnasium, EnvPool or Stable-Baselines3."""

    def started():
        envs = make()
        envs.reset()
        return envs.step

    return started


def sync_cartpole():
    """The environments of a single-file PPO loop in CleanRL's form."""
    return sync_vector(lambda: gymnasium.make("CartPole-v1"))


def sync_pong():
    return sync_vector(preprocessed_pong)


def sync_vector(make_env):
    wrapped = gymnasium.wrappers.RecordEpisodeStatistics
    return gymnasium.vector.SyncVectorEnv([lambda: wrapped(make_env())] * ENVS)


def sb3_cartpole_envs():
    from stable_baselines3.common.env_util import make_vec_env

    return make_vec_env("CartPole-v1", ENVS, seed=0)


def sb3_pong_envs():
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    kwargs = {"env_kwargs": ATARI, "wrapper_kwargs": {"terminal_on_life_loss": False}}
    return VecFrameStack(make_atari_env("ALE/Pong-v5", ENVS, seed=0, **kwargs), 4)


def preprocessed_pong(**kwargs) -> gymnasium.Env:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", **(ATARI | kwargs))
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


def atari_vector():
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", ENVS, num_threads=1)


def pool_pong(num_envs, seed=0):
    import envpool

    kwargs = {"repeat_action_probability": 0.25, "reward_clip": True}
    return envpool.make_gymnasium("Pong-v5", num_envs=num_envs, num_threads=1, seed=seed, **kwargs)


def pool_cartpole(num_envs, seed=0):
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=1, seed=seed)


class PointMassEnv(gymnasium.Env):
    """One mass of the simulator, in numpy: what a user writes who has no batched simulator."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.target, self.wind = self.np_random.uniform(-1, 1, (3, 2)).astype(np.float32)
        self.velocity = np.zeros(2, np.float32)
        return self.look(), {}

    def step(self, action):
        force = np.clip(action, -1.0, 1.0) + 0.5 * self.wind
        self.velocity = 0.8 * self.velocity + 0.2 * force
        self.position = self.position + 0.2 * self.velocity
        distance = float(np.square(self.target - self.position).sum())
        left = bool((np.abs(self.position) > 2.0).any())
        return self.look(), 1.0 - distance - 10.0 * left, left, False, {}

    def look(self):
        return np.concatenate([self.target - self.position, self.velocity])


def choices(count):
    return lambda generator, shape: generator.integers(count, size=shape)


def forces(generator, shape):
    return generator.normal(size=(*shape, 2)).astype(np.float32)


PONG = {
    "Lockstep, single, AtariPreprocessing": ("ale_py", gym_task("PreprocessedPong-v0")),
    "Lockstep, AtariVectorEnv, 8 lanes": ("ale_py", gym_task("ALE/Pong-v5")),
    "Lockstep, AtariVectorEnv, 1 lane": ("ale_py", gym_task("ALE/Pong-v5", lanes=1)),
    "Lockstep, EnvPool": ("envpool", gym_task("PoolPong-v0")),
    "AtariVectorEnv alone": ("ale_py", vector(atari_vector)),
    "EnvPool alone": ("envpool", vector(lambda: pool_pong(ENVS))),
    "Stable-Baselines3": ("stable_baselines3", vector(sb3_pong_envs)),
    "SyncVectorEnv (CleanRL's form)": ("ale_py", vector(sync_pong)),
}
CARTPOLE = {
    "Lockstep, single": ("gymnasium", gym_task("CartPole-v1")),
    "Lockstep, vector entry point": ("gymnasium", gym_task("CartPole-v1", vectorization_mode="vector_entry_point")),
    "Lockstep, EnvPool": ("envpool", gym_task("PoolCartPole-v1")),
    "make_vec alone": ("gymnasium", vector(lambda: gymnasium.make_vec("CartPole-v1", ENVS))),
    "EnvPool alone": ("envpool", vector(lambda: pool_cartpole(ENVS))),
    "Stable-Baselines3": ("stable_baselines3", vector(sb3_cartpole_envs)),
    "SyncVectorEnv (CleanRL's form)": ("gymnasium", vector(sync_cartpole)),
}
SIMULATOR = {
    "Lockstep, single": ("gymnasium", gym_task("PointMass-v0", num_envs=MASSES)),
    "Lockstep, simulator, 8 lanes": ("torch", simulator_task(8)),
    "Lockstep, simulator, 1 lane": ("torch", simulator_task(1)),
    "simulator alone": ("torch", bare_simulator),
}
WORK = {
    "pong": (PONG, ENVS, 80, choices(6)),
    "cartpole": (CARTPOLE, ENVS, 1_000, choices(2)),
    "simulator": (SIMULATOR, MASSES, 100, forces),
}
"""Contenders, environments, steps per round and actions of each kind of work."""


if __name__ == "__main__":
    main()
