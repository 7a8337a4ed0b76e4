"""Training loop. Read this first: everything Lockstep does happens in the order of these lines."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lockstep.base import Algorithm, Dataset, VecEnv
from lockstep.clock import TrainState
from lockstep.config import Recipe
from lockstep.digest_log import DigestLog
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate_during_training, evaluation_interval
from lockstep.initial_weights import load_weights
from lockstep.launch.device import device_notes
from lockstep.memory_report import explain_out_of_memory
from lockstep.metrics import Totals
from lockstep.nan_dump import dump_on_nonfinite
from lockstep.run_dir import RunDir, TrainResult
from lockstep.update_trace import TraceOptions, UpdateTrace


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    at: int | None = None,
    stop_at: int | None = None,
    init_from: str | None = None,
    without_replay: bool = False,
    trace: dict[str, Any] | None = None,
    on_record: Callable[[], None] | None = None,
) -> TrainResult:
    """Train one agent on all started processes, up to `stop_at` samples. `on_record` is called after log changes.

    `trace` are the options of an `UpdateTrace`, in a replay.
    """
    config = recipe.run
    with Runtime.start(config) as runtime, RunDir.open(recipe, runtime, resume) as run, ExitStack() as on_exit:
        with explain_out_of_memory(recipe):
            task: Any = recipe.task.build(runtime.lanes, runtime.device)  # a VecEnv or a Dataset
            on_exit.callback(task.close)
            if not resume:
                recipe.algo.check_task(task)
            algorithm: Algorithm = recipe.algo.build(task, runtime)
        on_exit.enter_context(explain_out_of_memory(recipe, algorithm))
        runtime.pending_messages += device_notes(runtime.device, algorithm, recipe.algo)
        initial = load_weights(init_from, recipe, algorithm, task, runtime) if init_from else []
        evaluated = task if isinstance(task, Dataset) else recipe.task  # environments are built again
        eval_every = evaluation_interval(task, config, runtime, algorithm.eval_share)
        run.log.set_eval_interval(eval_every)
        clock = TrainState(total_samples=config.total_samples, patience=config.early_stop_patience)
        run.restore(algorithm, task, clock, at, without_replay)  # a new run has nothing to restore
        for message in initial if clock.iteration == 0 else ():
            run.checkpoints.chain.started_with = "weights of another run"
            run.log.message(message)
        runtime.check_replicas(algorithm.shared_state(), "at the start")
        if trace is not None:
            runtime.before_update = UpdateTrace(TraceOptions(**trace), algorithm, task, clock, runtime)
        digests = DigestLog(run.log, config, runtime, run.checkpoints.fence)
        digests.record_start(clock, algorithm, task)

        stop = clock.reached(stop_at)
        while not stop and (clock.eval_pending or not clock.done):
            # One iteration: collect and learn. Dump the inputs if it produces non-finite values.
            if not clock.eval_pending:
                with dump_on_nonfinite(run.path, algorithm, task, clock, runtime):
                    totals = iterate(task, algorithm, clock, runtime, config.replica_check_every)
                digests.record(clock, algorithm, task, totals)
                run.log.on_iteration_end(clock, algorithm.updates)
                if clock.crossed(config.log_every) or clock.done:
                    run.write_log(clock)
                clock.eval_pending = clock.crossed(eval_every) or (clock.done and bool(eval_every))

            # Evaluate. Interrupted by a stop request (None): the evaluation reruns after resume.
            if clock.eval_pending:
                with runtime.phase("evaluate"):
                    scores = evaluate_during_training(
                        algorithm.policy(), evaluated, runtime, config, algorithm.eval_share, clock.done
                    )
                if scores is not None:
                    run.record_evaluation(clock, scores, algorithm, task)
            if on_record is not None:
                on_record()

            # One all-reduce per iteration synchronizes all rank-local decisions.
            agreed = runtime.all_reduce_any(
                stop=runtime.status.stop_requested, save=run.checkpoints.due(), superseded=run.checkpoints.fence.poll()
            )
            if agreed["superseded"]:
                raise run.checkpoints.fence.error()
            stop = agreed["stop"] or clock.reached(stop_at)
            if agreed["save"] or clock.crossed(config.save_every) or clock.crossed(config.keep_every):
                run.checkpoints.save(algorithm, task, clock)

        return run.finish(algorithm, task, clock, preempted=clock.eval_pending or not clock.done)


def iterate(task: VecEnv, algorithm: Algorithm, clock: TrainState, runtime: Runtime, check_every: int) -> Totals:
    """Run one iteration, as benchmarks do: collect, learn, compare the replicas. Return the pooled metrics."""
    before = runtime.status.update = algorithm.updates
    task.on_iteration_start(clock)  # curriculum: a function of the clock, equal on all processes
    with runtime.phase("collect"):
        metrics = algorithm.collect(clock).with_prefix("rollout")
    with runtime.phase("learn"):
        metrics += algorithm.update(clock).with_prefix("train")
    clock.advance(algorithm.samples)  # global samples
    totals = runtime.reduce_metrics(metrics)  # pooled over all lanes
    clock.accumulate(totals)
    if algorithm.updates // check_every > before // check_every:
        runtime.check_replicas(algorithm.shared_state(), f"update {algorithm.updates}")
    return totals
