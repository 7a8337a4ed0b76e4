"""The loop. Read this first: everything Lockstep does happens in the order of these lines."""

from contextlib import ExitStack

from lockstep.checkpoint.fencing import SupersededError
from lockstep.checkpoint.manager import load_weights
from lockstep.clock import TrainState
from lockstep.config import Recipe
from lockstep.distributed import Runtime
from lockstep.evaluate import evaluate
from lockstep.launch.device import device_notes
from lockstep.nan_dump import dump_on_nonfinite
from lockstep.protocols import Algorithm, VecEnv
from lockstep.run_dir import RunDir, TrainResult


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    at: int | None = None,
    init_from: str | None = None,
    without_replay: bool = False,
) -> TrainResult:
    """Train one agent on every process that was started, and return where it stands."""
    config = recipe.run
    with Runtime.start(config) as runtime, RunDir.open(recipe, runtime, resume) as run, ExitStack() as on_leaving:
        task: VecEnv = recipe.task.build(runtime.lanes, runtime.device)
        on_leaving.callback(task.close)
        algorithm: Algorithm = recipe.algo.build(task, runtime)
        runtime.pending_messages += device_notes(runtime.device, algorithm, recipe.algo)
        if init_from:
            load_weights(init_from, algorithm, runtime)
        clock = TrainState(
            total_samples=config.total_samples, patience=config.early_stop_patience
        )  # at zero on a fresh run
        run.restore(algorithm, task, clock, at, without_replay)
        runtime.check_replicas(algorithm.shared_state(), "at the start")  # one agent, or stop here
        if config.log_tensor_digests:
            run.record_digests(clock, algorithm, task)  # what came back, before anything is done with it

        stop = False
        while not stop and (clock.eval_pending or not clock.done):
            if not clock.eval_pending:
                with dump_on_nonfinite(
                    run.path, algorithm, task, clock, runtime
                ):  # bad numbers: what led to them is kept
                    iterate(task, algorithm, clock, runtime, config.replica_check_every)
                run.log.on_iteration_end(clock, algorithm.updates)
                if clock.crossed(config.log_every) or clock.done:
                    run.write_log(clock)
                clock.eval_pending = clock.crossed(config.eval_every) or (clock.done and bool(config.eval_every))
            if clock.eval_pending:
                with runtime.phase("evaluate"):
                    scores = evaluate(algorithm.policy(), recipe.task, runtime, config.eval_episodes)
                if scores is not None:  # else a request to stop cut it short: whoever goes on begins with it
                    run.record_evaluation(clock, scores, algorithm, task)
            if config.log_tensor_digests:
                run.record_digests(clock, algorithm, task)

            # One small agreement an iteration carries everything that one process may know before the others.
            agreed = runtime.all_reduce_any(
                stop=runtime.status.stop_requested, save=run.checkpoints.due(), superseded=run.checkpoints.fence.poll()
            )
            if agreed["superseded"]:
                raise SupersededError(
                    run.checkpoints.fence.superseded_by or "the main process found that this run was started anew."
                )
            stop = agreed["stop"]
            if agreed["save"] or clock.crossed(config.save_every) or clock.crossed(config.keep_every):
                run.checkpoints.save(algorithm, task, clock)

        return run.finish(algorithm, task, clock, preempted=clock.eval_pending or not clock.done)


def iterate(task: VecEnv, algorithm: Algorithm, clock: TrainState, runtime: Runtime, check_every: int) -> None:
    """Collect, learn, and compare the processes; the same for a run that trains and for one that is measured."""
    before = runtime.status.update = algorithm.updates
    task.on_iteration_start(clock)  # difficulty, curriculum: time and agreed results only
    with runtime.phase("collect"):
        metrics = algorithm.collect(clock).with_prefix("rollout")
    with runtime.phase("learn"):
        metrics += algorithm.update(clock).with_prefix("train")
    clock.advance(algorithm.samples)  # global samples
    clock.accumulate(runtime.reduce_metrics(metrics))  # pooled over all lanes
    if algorithm.updates // check_every > before // check_every:
        runtime.check_replicas(algorithm.shared_state(), f"update {algorithm.updates}")
