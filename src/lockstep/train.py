"""The loop. Read this first: everything Lockstep does happens in the order of these lines."""

from contextlib import ExitStack

from lockstep.config import Recipe
from lockstep.evaluate import evaluate
from lockstep.protocols import Algorithm, Clock, VecEnv
from lockstep.run.checkpoints import load_weights
from lockstep.run.fence import Outdated
from lockstep.run.inspection import inspecting
from lockstep.run.rundir import Result, RunDir
from lockstep.runtime import Runtime
from lockstep.runtime.place import device_notes


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    at: int | None = None,
    init_from: str | None = None,
    without_replay: bool = False,
) -> Result:
    """Train one agent on every process that was started, and return where it stands."""
    config = recipe.run
    with Runtime.start(config) as runtime, RunDir.open(recipe, runtime, resume) as run, ExitStack() as on_leaving:
        task: VecEnv = recipe.task.build(runtime.lanes, runtime.device)
        on_leaving.callback(task.close)
        algorithm: Algorithm = recipe.algo.build(task, runtime)
        runtime.notes += device_notes(runtime.device, algorithm, recipe.algo)
        if init_from:
            load_weights(init_from, algorithm, runtime)
        clock = Clock(budget=config.samples, patience=config.patience)  # at zero on a fresh run
        run.restore(algorithm, task, clock, at, without_replay)
        runtime.in_sync(algorithm.shared_state(), "at the start")  # one agent, or stop here
        if config.digests:
            run.record_digests(clock, algorithm, task)  # what came back, before anything is done with it

        stop = False
        while not stop and (clock.owes_evaluation or not clock.done):
            if not clock.owes_evaluation:
                with inspecting(run.path, algorithm, task, clock, runtime):  # bad numbers: what led to them is kept
                    iterate(task, algorithm, clock, runtime, config.check_every)
                run.log.tick(clock, algorithm.updates)
                if clock.every(config.log_every) or clock.done:
                    run.write_log(clock)
                clock.owes_evaluation = clock.every(config.eval_every) or (clock.done and bool(config.eval_every))
            if clock.owes_evaluation:
                with runtime.phase("evaluate"):
                    scores = evaluate(algorithm.policy(), recipe.task, runtime, config.eval_episodes)
                if scores is not None:  # else a request to stop cut it short: whoever goes on begins with it
                    run.keep_best(clock, scores, algorithm, task)
            if config.digests:
                run.record_digests(clock, algorithm, task)

            # One small agreement an iteration carries everything that one process may know before the others.
            agreed = runtime.agree(
                stop=runtime.interrupted, save=run.checkpoints.due(), outdated=run.checkpoints.fence.look()
            )
            if agreed["outdated"]:
                raise Outdated(
                    run.checkpoints.fence.outdated or "the main process found that this run was started anew."
                )
            stop = agreed["stop"]
            if agreed["save"] or clock.every(config.save_every) or clock.every(config.keep_every):
                run.checkpoints.save(algorithm, task, clock)

        return run.finish(algorithm, task, clock, preempted=clock.owes_evaluation or not clock.done)


def iterate(task: VecEnv, algorithm: Algorithm, clock: Clock, runtime: Runtime, check_every: int) -> None:
    """Collect, learn, and compare the processes; the same for a run that trains and for one that is measured."""
    before = runtime.update = algorithm.updates
    task.advance(clock)  # difficulty, curriculum: time and agreed results only
    with runtime.phase("collect"):
        metrics = algorithm.collect(clock).under("rollout")
    with runtime.phase("learn"):
        metrics += algorithm.update(clock).under("train")
    clock.advance(algorithm.samples)  # global samples
    clock.count(runtime.reduce(metrics))  # pooled over all lanes
    if algorithm.updates // check_every > before // check_every:
        runtime.in_sync(algorithm.shared_state(), f"update {algorithm.updates}")
