"""The one-agent proof in small, on real processes: reductions timed, N against 1, and a checkpoint of N read by 1."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import Recipe, overlay
from lockstep.doctor.line import Line, trouble, well
from lockstep.loading import load
from lockstep.protocols import Clock
from lockstep.recipes import find_recipe
from lockstep.run.format import hash_checkpoint
from lockstep.run.lineage import find
from lockstep.run.records import CHECKPOINTS
from lockstep.run.rundir import RunDir
from lockstep.runtime import Runtime
from lockstep.runtime.launch import launch_quietly
from lockstep.speed.measure import time_reductions
from lockstep.train import iterate

TIMES = "reductions.json"
TOGETHER, ALONE = "together", "alone"
_ITERATIONS = 2
_SMALL = {
    "algo": {"epochs": 1, "horizon": 8, "batch_size": 64, "encoder": {"width": 8}},
    "run": {"reduction": "exact", "eval_every": None, "timeout": 20.0, "share_gpu": True},
}


def check_together(words: Sequence[str], processes: int, directory: Path) -> Iterator[Line]:
    """Start `lockstep WORDS` on several processes, which leads to `take_part`, and look at what they left."""
    count = "1 process" if processes == 1 else f"{processes} processes"
    cause = launch_quietly(words, processes)
    if cause:
        yield trouble(
            "one agent",
            f"{count} could not train together: {cause}",
            "Mend what stands above; docs/operate/troubles.md says more.",
        )
        return
    if processes > 1:
        yield well("reduction", _describe(json.loads((directory / TIMES).read_text())))
    hashes = [hash_of_run(directory / name) for name in (TOGETHER, ALONE)]
    if hashes[0] != hashes[1]:
        yield trouble(
            "one agent",
            f"{count} and one alone did not train the same agent: {hashes[0][:16]} and {hashes[1][:16]}",
            f"Do not train here yet: lockstep prove gym-ppo --procs 1 {processes} names the tensor; please report it.",
        )
    else:
        yield well("one agent", f"{count} and one alone trained the same agent, {hashes[0][:16]}")
    policy = load(directory / TOGETHER)
    action = policy.act([[0.0, 0.0, 0.0, 0.0]])
    yield well("checkpoint", f"written by {count}, read by one, which acts: {action.tolist()}")


def _describe(seconds: dict[str, float]) -> str:
    small, large = min(seconds, key=int), max(seconds, key=int)
    rate = int(large) / seconds[large] / 2**20
    return f"a sum over all takes {seconds[small] * 1e3:.2g} ms; of {int(large) / 2**20:.0f} MiB, {rate:,.0f} MiB/s"


def hash_of_run(run: Path) -> str:
    """Hash of a run's newest checkpoint."""
    return hash_checkpoint(run / CHECKPOINTS / str(find(run / CHECKPOINTS)[0]))


def take_part(directory: Path) -> None:
    """As one of the processes: time reductions, train together, and let the main one train the same alone."""
    recipe = overlay(overlay(find_recipe("gym-ppo")(), _SMALL), {"run.dir": str(directory)})
    with Runtime.start(recipe.run) as runtime:
        times = time_reductions(runtime, times=5)
        if runtime.main:
            (directory / TIMES).write_text(json.dumps(times))
        _train(overlay(recipe, {"run.name": TOGETHER}), runtime)
        lanes = dataclasses.replace(recipe.run, lanes=runtime.lanes.count)
        runtime.from_main(
            lambda: _train(overlay(recipe, {"run.name": ALONE}), Runtime.alone(lanes, str(runtime.device)))
        )


def _train(recipe: Recipe, runtime: Runtime) -> Any:
    """The loop, without its evaluations and its log."""
    recipe = overlay(recipe, {"run.lanes": runtime.lanes.count})
    task: Any = recipe.task.build(runtime.lanes, runtime.device)
    try:
        algorithm = recipe.algo.build(task, runtime)
        samples = _ITERATIONS * recipe.algo.iteration_samples(recipe.task)
        recipe = overlay(recipe, {"run.samples": samples})
        clock = Clock(budget=samples)
        with RunDir.open(recipe, runtime, False) as run:
            run.checkpoints.restore(algorithm, task, clock, None)
            while not clock.done:
                iterate(task, algorithm, clock, runtime, recipe.run.check_every)
            run.checkpoints.save(algorithm, task, clock)
            run.finish(algorithm, task, clock, preempted=False)
    finally:
        task.close()
