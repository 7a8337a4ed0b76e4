"""Run a suite: train the runs that have no result yet, and record each result as soon as its run has finished."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.apps.benchmark.planned_runs import PlannedRun, source_commit
from lockstep.apps.benchmark.results import BenchmarkResult, append_result, read_results
from lockstep.experiment.progress import RunsProgress
from lockstep.experiment.scheduler import RunScheduler, Start, start_lockstep
from lockstep.loggers.formatting import format_duration
from lockstep.tools.report.series import format_number


@dataclass
class SuiteRunner:
    """Trains the runs of a suite that have no result yet, at most `parallel` at a time."""

    planned: Sequence[PlannedRun]
    data: Path
    """Data file of the suite."""
    parallel: int
    progress: RunsProgress
    start: Start = start_lockstep
    failed: list[PlannedRun] = field(default_factory=list)
    """Runs that ended with an error."""
    stopped: bool = False
    """Whether a signal, to this process or to a run, ended training early."""

    def run(self) -> None:
        """Train until all runs have ended or a stop signal arrives. Every finished run is recorded at once."""
        self.data.parent.mkdir(parents=True, exist_ok=True)
        recorded = {result.command for result in read_results(self.data)}
        missing = [run for run in self.planned if run.command not in recorded]
        done = len(self.planned) - len(missing)
        if done:
            self.progress.event(f"{done} of {len(self.planned)} runs are in {self.data}.")
        commit = source_commit()
        scheduler = RunScheduler(
            missing,
            prepare=lambda run, slot: run.prepare(commit),
            record=self._record,
            parallel=self.parallel,
            progress=self.progress,
            start=self.start,
            done=done,
        )
        scheduler.run()
        self.failed, self.stopped = scheduler.failed, scheduler.stopped

    def _record(self, run: PlannedRun) -> str:
        result = run.result()
        append_result(self.data, result)
        return f"{describe_scores(result)}, {format_duration(result.seconds)}"


def describe_scores(result: BenchmarkResult) -> str:
    """Return the scores of a run as one line."""
    scores = {
        "training": result.training_return,
        "last evaluation": result.last_evaluation,
        "best": result.best_evaluation,
    }
    known = [f"{name} {format_number(score)}" for name, score in scores.items() if score is not None]
    return ", ".join(known) or "no episode ended"
