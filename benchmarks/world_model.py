"""TD-MPC2 beside its bare engine, plans of many environments beside single ones, and two processes beside one.

python benchmarks/world_model.py                   updates and plans against the bare engine, and batched plans
python benchmarks/world_model.py --scaling         two processes against one, updates and planning

The bare engine is the same tensors through the same modules with torch's Adam, and nothing around: no replay, no noise
that is drawn, no reduction, no environment. Everything is measured in turns; on one process in CPU time, because others
may share the machine.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from workload import start_again, started

from lockstep.algorithms.tdmpc2.mppi import split_obs
from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.pytree import tree_map
from lockstep.recipes.dmc_tdmpc2 import DMCTDMPC2

SMALL = {
    "algo.batch_size": 128,
    "algo.plan": {"num_samples": 64, "num_policy_samples": 8, "num_elites": 8, "iterations": 4},
    "algo.model": {"size": 1, "encoder": 64, "width": 64, "latent": 32, "num_q": 2},
}


def build(runtime, arguments):
    settings = SMALL if arguments.size == 0 else {"algo.model.size": arguments.size}
    settings |= {"task.tasks": [arguments.task], "algo.seed_samples": 64, "algo.buffer_size": 20_000}
    recipe = apply_overrides(DMCTDMPC2(), settings)
    task = recipe.task.build(runtime.lanes, runtime.device)
    return recipe.algo.build(task, runtime)


class Agent:
    """Iterates, and does the parts of an iteration apart."""

    def __init__(self, runtime, arguments):
        self.algorithm, self.clock = build(runtime, arguments), TrainState(total_samples=10**6)
        while self.algorithm.updates == 0:
            self.iterate()

    def iterate(self):
        self.collect()
        self.learn()

    def collect(self):
        self.algorithm.collect(self.clock)

    def learn(self):
        self.algorithm.update(self.clock)
        self.clock.advance(self.algorithm.samples)


def in_turns(contenders, rounds, clock):
    seconds = {name: [] for name in contenders}
    for work in contenders.values():
        work()
    for _ in range(rounds):
        for name, work in contenders.items():
            began = clock()
            work()
            seconds[name].append(clock() - began)
    return seconds


def ratio(seconds, top, bottom, factor=1.0):
    found = [factor * a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)]
    return f"{statistics.median(found):.2f}x ({min(found):.2f} to {max(found):.2f})"


def single_plans(algorithm):
    """Plans of all environments at once, and of one after another."""
    planner = algorithm.planner
    obs, task = split_obs(algorithm.task.observations())
    noise = planner.draw_noise(algorithm.act_rng, algorithm.elite_rng, 0, algorithm.envs_per_lane)
    pairs = planner.draw_pairs(algorithm.plan_pair_rng, 0)

    @torch.no_grad()
    def plan(own):
        tasks, part = None if task is None else task[own], tree_map(lambda x: x[own], noise)
        planner.plan(obs[own], tasks, algorithm.plans[own], part, pairs, explore=True)

    return lambda: plan(slice(None)), lambda: [plan(slice(env, env + 1)) for env in range(len(obs))]


def alone(arguments):
    run = apply_overrides(DMCTDMPC2(), {"run.compile": "on" if arguments.compile else "off"}).run
    agent = Agent(Runtime.single_process(run), arguments)
    algorithm = agent.algorithm
    env, plan, update = algorithm.benchmark_ops()
    together, one_by_one = single_plans(algorithm)
    contenders = {
        "collect": agent.collect,
        "bare collect": lambda: (plan.run(), env.run()),
        "learn": agent.learn,
        "bare learn": lambda: [update.run() for _ in range(update.calls_per_iteration)],
        "together": together,
        "one by one": one_by_one,
    }
    seconds = in_turns(contenders, arguments.rounds, time.process_time)
    envs, updates = algorithm.task.num_envs, update.calls_per_iteration
    parameters = sum(p.numel() for p in algorithm.model.parameters())
    print(f"{arguments.task}, {parameters:,} parameters, {envs} environments, {arguments.rounds} rounds, CPU time")
    print(f"  updates/s {updates / statistics.median(seconds['learn']):8.1f}   of the bare engine's", end=" ")
    print(ratio(seconds, "bare learn", "learn"))
    print(f"  plans/s   {envs / statistics.median(seconds['collect']):8.1f}   of the bare engine's", end=" ")
    print(ratio(seconds, "bare collect", "collect"))
    print(f"  one plan of {envs} environments against {envs} plans of one: {ratio(seconds, 'one by one', 'together')}")


def scaling(arguments):
    torch.set_num_threads(1)
    recipe = apply_overrides(DMCTDMPC2(), {"run.lanes": 8, "run.collective_timeout": 600.0})

    def clock():
        dist.barrier()
        return time.perf_counter()

    with Runtime.start(recipe.run) as runtime:
        single, pair = Agent(Runtime.single_process(recipe.run), arguments), Agent(runtime, arguments)
        contenders = {
            "one": single.iterate if runtime.is_main else lambda: None,
            "both alone": single.iterate,
            "two": pair.iterate,
        }
        seconds = in_turns(contenders, arguments.rounds, clock)
        if runtime.is_main:
            size = arguments.size or "small"
            print(f"{arguments.task}, size {size}, {arguments.rounds} rounds, two processes against one, wall time")
            print(f"  sharing nothing   {ratio(seconds, 'one', 'both alone', 2)}: what the machine allows")
            print(f"  the same run      {ratio(seconds, 'one', 'two')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--task", default="cartpole-balance")
    parser.add_argument("--size", type=int, default=0, help="1, 5, 19, 48 or 317; 0 is a very small one")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--scaling", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.scaling:
        alone(arguments)
    elif started():
        scaling(arguments)
    else:
        start_again(2)


if __name__ == "__main__":
    main()
