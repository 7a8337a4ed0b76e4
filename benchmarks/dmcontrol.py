"""Worlds of the control suite stepped one after another, in threads, and in worker processes: decisions a second.

python benchmarks/dmcontrol.py --tasks cartpole-balance walker-run humanoid-run

Eight environments, two threads or workers, wall time, in turns. Workers are as lean as they can be: a pipe each, arrays
of actions one way and of observations the other.
"""

import argparse
import multiprocessing
import statistics
import time

import numpy as np
import torch

from lockstep.lanes import Lanes
from lockstep.tasks.dm_control.env import DMControlConfig
from lockstep.tasks.dm_control.suite import SimulatedTask

ENVS, HANDS, STEPS = 8, 2, 25


def work(pipe, name, count):
    worlds = [SimulatedTask(name, 2, None, False) for _ in range(count)]
    for number, world in enumerate(worlds):
        world.begin(number)
    while (actions := pipe.recv()) is not None:
        outcomes = [world.act(action) for world, action in zip(worlds, actions, strict=True)]
        for number, (world, outcome) in enumerate(zip(worlds, outcomes, strict=True)):
            if outcome.ended:
                world.begin(number)
        pipe.send((np.stack([o.obs for o in outcomes]), [o.reward for o in outcomes]))


class Workers:
    def __init__(self, name):
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(HANDS)]
        self.pipes = [ours for ours, _ in ends]
        self.processes = [context.Process(target=work, args=(end, name, ENVS // HANDS)) for _, end in ends]
        for process in self.processes:
            process.start()

    def step_numpy(self, actions):
        for pipe, own in zip(self.pipes, np.split(actions, HANDS), strict=True):
            pipe.send(own)
        for pipe in self.pipes:
            pipe.recv()

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["cartpole-balance", "walker-run", "humanoid-run"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    lanes, cpu = Lanes(ENVS, range(ENVS), 0), torch.device("cpu")
    for name in arguments.tasks:
        ways = {
            "one after another": DMControlConfig(tasks=(name,), num_envs=ENVS).build(lanes, cpu),
            "threads": DMControlConfig(tasks=(name,), num_envs=ENVS, threads=HANDS).build(lanes, cpu),
            "workers": Workers(name),
        }
        features = ways["threads"].action_space.shape[0]
        for way in ("one after another", "threads"):
            ways[way].reset()
        seconds = {way: [] for way in ways}
        for number in range(arguments.rounds + 1):
            for way, envs in ways.items():
                actions = np.random.default_rng(number).uniform(-1, 1, (STEPS, ENVS, features))
                began = time.perf_counter()
                for action in actions:
                    envs.step_numpy(action)
                if number:  # the first warms up
                    seconds[way].append(time.perf_counter() - began)
        shown = {way: f"{ENVS * STEPS / statistics.median(each):,.0f}" for way, each in seconds.items()}
        print(f"{name:<18}" + "   ".join(f"{way} {speed}/s" for way, speed in shown.items()))
        for envs in ways.values():
            envs.close()


if __name__ == "__main__":
    main()
