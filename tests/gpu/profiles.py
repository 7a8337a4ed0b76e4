"""Kernel launches and host synchronizations of recipes on an emulated GPU, by phase of an iteration.

    python tests/gpu/profiles.py             # the table of docs/operate/gpus.md
    python tests/gpu/profiles.py graphs      # the same with run.compile=graphs

Sizes are small: they do not change the number of kernels.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import emulated_cuda
from helpers.multiprocess import together, use_emulated_gpus
from lockstep.clock import TrainState
from lockstep.config import apply_overrides, resolve_lanes
from lockstep.distributed import Runtime
from lockstep.distributed import runtime as runtimes
from lockstep.ops.philox import tensor_ops
from lockstep.registry import find_recipe
from lockstep.training_loop import iterate

PPO = {"task.num_envs": 8, "algo.rollout_steps": 4, "algo.epochs": 1}
RECURRENT = PPO | {"algo.bptt_steps": 1}
DDPG = {"task.num_envs": 8, "algo": {"batch_size": 8, "rollout_steps": 1, "learning_starts": 8, "buffer_size": 256}}
WORLD_MODEL = {
    "task": {"tasks": ["walker-run"], "episode_length": 10, "num_envs": 8},
    "algo": {"batch_size": 8, "seed_samples": 24, "buffer_size": 256, "rollout_steps": 1},
    "algo.plan": {"num_samples": 8, "num_policy_samples": 2, "num_elites": 4, "iterations": 6},
    "algo.model": {"size": 5, "encoder": 16, "width": 16, "latent": 16, "bins": 11},
}
FEW, MANY = "few", "many"
SETTINGS = {
    "snake-ppo": {FEW: PPO | {"algo.batch_size": 32}, MANY: PPO | {"algo.batch_size": 8}},
    "gym-ppo": {FEW: PPO | {"algo.batch_size": 32}, MANY: PPO | {"algo.batch_size": 8}},
    "gym-ppo-lstm": {
        FEW: PPO | {"algo.bptt_steps": 1, "algo.batch_size": 32},
        MANY: PPO | {"algo.bptt_steps": 1, "algo.batch_size": 8},
    },
    "trading-lstm": {
        FEW: PPO | {"algo.bptt_steps": 1, "algo.batch_size": 32},
        MANY: PPO | {"algo.bptt_steps": 1, "algo.batch_size": 8},
    },
    "gym-ddpg": {FEW: DDPG | {"algo.updates_per_sample": 0.125}, MANY: DDPG | {"algo.updates_per_sample": 0.5}},
    "gym-sac": {FEW: DDPG | {"algo.updates_per_sample": 0.125}, MANY: DDPG | {"algo.updates_per_sample": 0.5}},
    "team-ddpg": {FEW: DDPG | {"algo.updates_per_sample": 0.125}, MANY: DDPG | {"algo.updates_per_sample": 0.5}},
    "dmc-tdmpc2": {
        FEW: WORLD_MODEL | {"algo.updates_per_sample": 0.125},
        MANY: WORLD_MODEL | {"algo.updates_per_sample": 0.5},
    },
    "cricket-gnn": {FEW: {}},
}
"""Settings of an iteration with few updates and of one with more, by recipe."""
STEPS = {"snake-ppo": 4, "gym-ppo": 4, "gym-ppo-lstm": 4, "trading-lstm": 4}
"""Rollout steps per iteration of these recipes; one for the others."""


def profile(name: str, settings: dict, precision: str = "fp32", warm: int = 10) -> dict:
    """Return launches, synchronizations and their lines in one iteration of a recipe, by phase."""
    kind = find_recipe(name)
    recipe = apply_overrides(
        kind(), (kind.smoke_overrides if name == "cricket-gnn" else {}) | settings | {"run.precision": precision}
    )
    runtime = Runtime.single_process(resolve_lanes(recipe.run, 1), "cuda:0")
    task = recipe.task.build(runtime.lanes, runtime.device)
    algorithm, clock = recipe.algo.build(task, runtime), TrainState(total_samples=10**9)
    for _ in range(warm):
        iterate(task, algorithm, clock, runtime, 10**9)
    found: dict[str, dict] = {}
    device = sys.modules[emulated_cuda.EXTENSION]
    seen = [device.counts(), 0]

    def take() -> None:
        """Add the counts since the last call to the innermost phase."""
        phase = found.setdefault("/".join(runtime.status.phases), {"launches": 0, "syncs": 0, "lines": Counter()})
        (launches, syncs), log = device.counts(), device.sync_log()
        phase["launches"] += launches - seen[0][0]
        phase["syncs"] += syncs - seen[0][1]
        phase["lines"].update(f"{line or '?'} ({what})" for what, line in log[seen[1] :])
        seen[:] = [(launches, syncs), len(log)]

    turn = runtimes.Phase._switch_timer

    def counted(self: runtimes.Phase) -> None:
        take()
        turn(self)

    for kernel in ("draw", "integers_at"):  # one Triton kernel on a real GPU
        setattr(tensor_ops, kernel, _as_one_launch(getattr(tensor_ops, kernel)))
    device.clear()
    seen[:] = [device.counts(), 0]
    device.log_syncs(True)
    runtimes.Phase._switch_timer, before = counted, algorithm.updates
    try:
        iterate(task, algorithm, clock, runtime, 10**9)
        take()
    finally:
        runtimes.Phase._switch_timer = turn
        device.log_syncs(False)
    task.close()
    return {"updates": algorithm.updates - before, "phases": found}


def _as_one_launch(function):
    def launched(*arguments):
        with emulated_cuda.one_launch():
            return function(*arguments)

    return launched


def sum_of(profiled: dict, *prefixes: str) -> tuple[int, int, Counter]:
    """Sum launches, synchronizations and lines of all phases that start with one of the prefixes."""
    launches, syncs, lines = 0, 0, Counter()
    for phase, counts in profiled["phases"].items():
        if any(phase == prefix or (prefix and phase.startswith(prefix)) for prefix in prefixes):
            launches, syncs = launches + counts["launches"], syncs + counts["syncs"]
            lines.update(counts["lines"])
    return launches, syncs, lines


def on_gpu(name: str, settings: dict, precision: str = "fp32") -> dict:
    return together(profile, 1, name, settings, precision, environment={"EMULATED_GPUS": "1"})[0]


def main(mode: str = "off") -> None:
    use_emulated_gpus(True)
    print("| recipe | rollout step | update | rest of an iteration |")
    print("| --- | --- | --- | --- |")
    for name, settings in SETTINGS.items():
        settings = {size: part | {"run.compile": mode} for size, part in settings.items()}
        few = on_gpu(name, settings[FEW])
        acting = sum_of(few, "collect/act", "collect/env")
        learning = sum_of(few, "learn")
        everything = sum_of(few, *few["phases"])
        steps, updates = STEPS.get(name, 1), few["updates"]
        if MANY in settings:
            many = on_gpu(name, settings[MANY])
            more = many["updates"] - updates
            update = [(m - f) / more for m, f in zip(sum_of(many, "learn")[:2], learning[:2], strict=True)]
        else:
            update = [count / updates for count in learning[:2]]
        rest = [everything[i] - acting[i] - updates * update[i] for i in (0, 1)]
        step = f"{acting[0] / steps:.0f} / {acting[1] / steps:.0f}" if acting[0] else "-"
        print(f"| {name} | {step} | {update[0]:.0f} / {update[1]:.0f} | {rest[0]:.0f} / {rest[1]:.0f} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
