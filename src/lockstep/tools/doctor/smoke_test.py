"""Small training run on N processes: times all-reduces, compares the hash with 1 process, and loads the checkpoint."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find
from lockstep.clock import TrainState
from lockstep.config import Recipe, apply_overrides
from lockstep.distributed import Runtime
from lockstep.inference import load
from lockstep.io.jsonl import CHECKPOINTS
from lockstep.launch.launcher import launch_captured
from lockstep.registry import find_recipe
from lockstep.run_dir import RunDir
from lockstep.tools.bench.measure import time_reductions
from lockstep.tools.doctor.finding import CheckResult, failure, ok
from lockstep.training_loop import iterate

TIMES_FILE = "reductions.json"
TOGETHER, ALONE = "together", "alone"
_ITERATIONS = 2
_SMALL = {
    "algo": {"epochs": 1, "rollout_steps": 8, "batch_size": 64, "encoder": {"hidden_sizes": 8}},
    "run": {"reduction": "exact", "eval_every": None, "collective_timeout": 20.0, "share_gpu": True},
}


def check_distributed(args: Sequence[str], processes: int, directory: Path) -> Iterator[CheckResult]:
    """Start `lockstep ARGS`, which calls `worker_main`, on several processes, and check the files they wrote."""
    count = "1 process" if processes == 1 else f"{processes} processes"
    cause = launch_captured(args, processes)
    if cause:
        yield failure(
            "one agent",
            f"{count} could not train together: {cause}",
            "Fix the error above; see docs/operate/troubleshooting.md.",
        )
        return
    if processes > 1:
        yield ok("reduction", _describe(json.loads((directory / TIMES_FILE).read_text())))
    hashes = [hash_of_run(directory / name) for name in (TOGETHER, ALONE)]
    if hashes[0] != hashes[1]:
        yield failure(
            "one agent",
            f"{count} and a single process did not train the same agent: {hashes[0][:16]} and {hashes[1][:16]}",
            f"Find the first tensor that differs with `lockstep prove gym-ppo --procs 1 {processes}`, and report it.",
        )
    else:
        yield ok("one agent", f"{count} and a single process trained the same agent, {hashes[0][:16]}")
    policy = load(directory / TOGETHER)
    action = policy.act([[0.0, 0.0, 0.0, 0.0]])
    yield ok("checkpoint", f"written by {count}, loaded by a single process, which computed actions: {action.tolist()}")


def _describe(seconds: dict[str, float]) -> str:
    small, large = min(seconds, key=int), max(seconds, key=int)
    rate = int(large) / seconds[large] / 2**20
    return f"an all-reduce takes {seconds[small] * 1e3:.2g} ms; {int(large) / 2**20:.0f} MiB run at {rate:,.0f} MiB/s"


def hash_of_run(run: Path) -> str:
    """Hash of a run's newest checkpoint."""
    return hash_checkpoint(run / CHECKPOINTS / str(find(run / CHECKPOINTS)[0]))


def worker_main(directory: Path) -> None:
    """Time all-reduces and train in this process group; then train the same agent in the main process alone."""
    recipe = apply_overrides(apply_overrides(find_recipe("gym-ppo")(), _SMALL), {"run.runs_dir": str(directory)})
    with Runtime.start(recipe.run) as runtime:
        times = time_reductions(runtime, times=5)
        if runtime.is_main:
            (directory / TIMES_FILE).write_text(json.dumps(times))
        _train(apply_overrides(recipe, {"run.name": TOGETHER}), runtime)
        lanes = dataclasses.replace(recipe.run, lanes=runtime.lanes.num_lanes)
        alone = apply_overrides(recipe, {"run.name": ALONE})
        runtime.run_on_main(lambda: _train(alone, Runtime.single_process(lanes, str(runtime.device))))


def _train(recipe: Recipe, runtime: Runtime) -> Any:
    """Run the training loop without evaluation and logging."""
    samples = _ITERATIONS * recipe.algo.samples_per_iteration(recipe.task)
    recipe = apply_overrides(recipe, {"run.lanes": runtime.lanes.num_lanes, "run.total_samples": samples})
    task: Any = recipe.task.build(runtime.lanes, runtime.device)
    with closing(task):
        algorithm = recipe.algo.build(task, runtime)
        clock = TrainState(total_samples=samples)
        with RunDir.open(recipe, runtime, False) as run:
            run.checkpoints.restore(algorithm, task, clock, None)
            while not clock.done:
                iterate(task, algorithm, clock, runtime, recipe.run.replica_check_every)
            run.checkpoints.save(algorithm, task, clock)
            run.finish(algorithm, task, clock, preempted=False)
