"""How long until PPO eats: CPU seconds to a mean of 12 apples on the 6x6 board, Lockstep against Stable-Baselines3.

OMP_NUM_THREADS=1 python benchmarks/peers/time_to_score.py --json apples.json
OMP_NUM_THREADS=1 python benchmarks/peers/time_to_score.py --only lockstep-fp32,sb3-same --seeds 0 --max-steps 20000

Both play the same compiled boards with the same rewards and learn with the same network, on one thread. The measure is
the same too: apples of the last 100 *training* episodes that ended, looked at after each iteration. Time is CPU time
of the process from before the agent is built; imports, compiled kernels and a throwaway agent's first iteration come
before that and are not counted. Lockstep runs its recipe's `--preset tiny` with the numbers of QUICK, found by trying
eight; SB3 may show its best of three settings, the very same numbers among them.
"""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

GOAL, EPISODES, SIZE = 12.0, 100, 6
BUDGET, RATE = 2_500_000, 8e-4  # for a learning rate that falls linearly
QUICK = {"task.num_envs": 64, "algo": {"rollout_steps": 32, "batch_size": 512, "learning_rate": RATE}}

SB3 = {
    # What one gets by changing nothing: 2,048 samples an iteration, ten epochs of minibatches of 64.
    "defaults": {"envs": 8, "n_steps": 256},
    # The numbers Lockstep uses here, its schedule included.
    "same": {
        "envs": 64,
        "n_steps": 32,
        "batch_size": 512,
        "n_epochs": 4,
        "ent_coef": 0.01,
        "vf_coef": 0.25,  # lockstep halves the squared error once more
        "learning_rate": lambda left: RATE * left,
    },
    # Between the two: RL Zoo's numbers for Atari, on more environments.
    "middle": {
        "envs": 32,
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "ent_coef": 0.01,
        "learning_rate": 2.5e-4,
    },
}
CONTENDERS = ["lockstep-fp32", "lockstep-bf16", *(f"sb3-{name}" for name in SB3)]


class Watch:
    """Decides after each iteration whether a run is over, and says how it went."""

    def __init__(self, args):
        self.args, self.steps, self.apples, self.reached = args, 0, 0.0, False
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def over(self, recent, steps):
        self.steps, self.apples = steps, statistics.fmean(recent) if recent else 0.0
        self.reached = len(recent) == EPISODES and self.apples >= self.args.goal
        seconds = time.process_time() - self.cpu
        return self.reached or steps >= self.args.max_steps or seconds >= self.args.max_seconds

    def result(self):
        return {
            "contender": self.args.contender,
            "seed": self.args.seed,
            "reached": self.reached,
            "cpu_seconds": time.process_time() - self.cpu,
            "wall_seconds": time.perf_counter() - self.wall,
            "steps": self.steps,
            "apples": self.apples,
        }


def train_lockstep(args, precision):
    import workload
    from lockstep_peer import Loop

    from lockstep.config import apply_overrides
    from lockstep.recipes.snake_ppo import SnakePPO

    tiny = apply_overrides(apply_overrides(SnakePPO(), SnakePPO.presets["tiny"]), QUICK)
    recipe = apply_overrides(tiny, {"run": {"precision": precision, "seed": args.seed}})
    Loop(recipe).iterate()  # compiles
    watch = Watch(args)
    loop = Loop(recipe)
    recent = workload.remember_apples(loop.task, EPISODES)
    while True:
        loop.iterate()
        if watch.over(recent, loop.clock.samples):
            return watch.result()


def train_sb3(args, setting):
    import sb3
    import workload
    from stable_baselines3.common.callbacks import BaseCallback

    class Stop(BaseCallback):
        """A new rollout begins where an iteration has ended; SB3 can be stopped at the step that follows."""

        over = False

        def _on_rollout_start(self):
            self.over = self.num_timesteps > 0 and watch.over(recent, self.num_timesteps)

        def _on_step(self):
            return not self.over

    settings = dict(SB3[setting])
    envs = settings.pop("envs")
    throwaway = sb3.build(workload.boards(SIZE, envs), "cnn", seed=args.seed, **settings)
    throwaway.learn(envs * throwaway.n_steps, log_interval=None)  # compiles
    watch = Watch(args)
    task = workload.boards(SIZE, envs, args.seed)
    recent = workload.remember_apples(task, EPISODES)
    agent = sb3.build(task, "cnn", seed=args.seed, **settings)
    agent.learn(BUDGET, callback=Stop(), log_interval=None)
    return watch.result()


def contend(args):
    """One run, in this process: a line of JSON."""
    import torch

    torch.set_num_threads(1)
    peer, setting = args.contender.split("-")
    print(json.dumps({"lockstep": train_lockstep, "sb3": train_sb3}[peer](args, setting)))


def table(results, goal):
    """Markdown: the median over seeds; a run that did not get there counts as endless."""
    lines = [
        f"| {goal:g} apples on {SIZE}x{SIZE} | CPU s, median | each seed | steps, median |",
        "| --- | ---: | --- | ---: |",
    ]
    middles = {}
    for name in dict.fromkeys(result["contender"] for result in results):
        runs = [result for result in results if result["contender"] == name]
        seconds = [run["cpu_seconds"] if run["reached"] else math.inf for run in runs]
        middles[name] = middle = statistics.median(seconds)
        # What was seen of a run that was cut off: where it stood.
        each = [
            f"{run['cpu_seconds']:.0f}"
            if run["reached"]
            else f"not reached ({run['apples']:.1f} after {run['steps']:,} steps, {run['cpu_seconds']:.0f} s)"
            for run in runs
        ]
        steps = statistics.median(run["steps"] for run in runs)
        shown = f"{middle:.0f}" if middle < math.inf else "not reached"
        lines.append(f"| {name} | {shown} | {', '.join(each)} | {steps:,.0f} |")
    best = min((middle for name, middle in middles.items() if name.startswith("sb3")), default=math.inf)
    for name in ("lockstep-fp32", "lockstep-bf16"):
        if name in middles and max(best, middles[name]) < math.inf:
            lines.append(f"\n{name} is {best / middles[name]:.2f} times as quick as SB3's best setting.")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goal", type=float, default=GOAL, help="mean apples to reach")
    parser.add_argument("--max-steps", type=int, default=600_000)
    parser.add_argument("--max-seconds", type=float, default=900.0, help="of CPU time, each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there too")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)  # for the processes it starts
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        return contend(args)

    from run import PeerError, chosen, run_script

    results, limits = [], ["--goal", args.goal, "--max-steps", args.max_steps, "--max-seconds", args.max_seconds]
    for seed in args.seeds:  # in turns, so that a busy hour falls on everybody
        for name in chosen(args.only, CONTENDERS):
            try:
                result = run_script(name, Path(__file__).resolve(), "--contender", name, "--seed", seed, *limits)
            except PeerError as error:
                print(f"{name}, seed {seed} did not run: {error}", flush=True)
                continue
            results.append(result)
            print(json.dumps(result), flush=True)
            if args.json:  # as they come: the whole takes hours
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + table(results, args.goal))


if __name__ == "__main__":
    sys.exit(main())
