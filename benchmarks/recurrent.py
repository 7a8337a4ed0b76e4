"""Recurrent PPO beside sb3-contrib's: sample-epochs a CPU-second of learning, in turns, on the same task and sizes.

    pip install sb3-contrib; python benchmarks/recurrent.py

Both have 8 environments of CartPole-v1 without velocities, an LSTM of 64 units each for policy and value and one layer
of 64 beside it, one thread. What is timed is learning alone, on a rollout collected before: `update` here, `train`
there. CPU time, because others may share the machine.
"""

import argparse
import statistics
import time
import warnings

import gymnasium
import numpy as np
import torch

from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.registry import find_recipe

SETTINGS = {"rollout_steps": 128, "batch_size": 512, "epochs": 10}


class Ours:
    name = "lockstep"

    def __init__(self, units):
        settings = {"algo": {**SETTINGS, "bptt_steps": 64, "normalize_obs": False, "recurrent.hidden_size": units}}
        recipe = apply_overrides(find_recipe("gym-ppo-lstm")(), {"task.mask_velocity": True, **settings})
        runtime = Runtime.single_process(recipe.run)
        self.agent = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)
        self.clock = TrainState(total_samples=10**6)

    def collect(self):
        self.agent.collect(self.clock)

    def learn(self):
        self.agent.update(self.clock)
        self.clock.advance(self.agent.samples)

    def parameters(self):
        return sum(p.numel() for p in self.agent.net.parameters())


class Theirs:
    name = "sb3-contrib"

    def __init__(self, units):
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.vec_env import DummyVecEnv

        def hide(obs):
            return obs * np.array([1, 0, 1, 0], np.float32)

        def make():
            env = gymnasium.make("CartPole-v1")
            return gymnasium.wrappers.TransformObservation(env, hide, env.observation_space)

        self.agent = RecurrentPPO(
            "MlpLstmPolicy",
            DummyVecEnv([make] * 8),
            n_steps=SETTINGS["rollout_steps"],
            batch_size=SETTINGS["batch_size"],
            n_epochs=SETTINGS["epochs"],
            policy_kwargs={"lstm_hidden_size": units, "net_arch": [64], "enable_critic_lstm": True},
            device="cpu",
            seed=0,
        )
        _, self.callback = self.agent._setup_learn(10**6)
        assert isinstance(self.callback, BaseCallback)

    def collect(self):
        agent = self.agent
        agent.collect_rollouts(
            agent.env, self.callback, agent.rollout_buffer, n_rollout_steps=SETTINGS["rollout_steps"]
        )

    def learn(self):
        self.agent.train()

    def parameters(self):
        return sum(p.numel() for p in self.agent.policy.parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--units", type=int, default=64)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    peers = [Ours(args.units), Theirs(args.units)]
    speeds = {peer.name: [] for peer in peers}
    for number in range(args.rounds + 1):
        for peer in peers:
            peer.collect()
            start = time.process_time()
            peer.learn()
            seconds = time.process_time() - start
            if number:  # the first warms up
                speeds[peer.name].append(8 * SETTINGS["rollout_steps"] * SETTINGS["epochs"] / seconds)
    for peer in peers:
        speed = statistics.median(speeds[peer.name])
        print(f"{peer.name:12} {speed:10,.0f} sample-epochs/s  {peer.parameters():,} parameters")
    pairs = zip(*speeds.values(), strict=True)
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    print(f"ratio {statistics.median(ratios):.1f} (from {ratios[0]:.1f} to {ratios[-1]:.1f} in {len(ratios)} turns)")


if __name__ == "__main__":
    main()
