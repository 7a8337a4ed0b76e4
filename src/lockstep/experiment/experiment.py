"""Results of an experiment as plain data, read from the directories of its runs."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config import ConfigError
from lockstep.experiment.record import overall_state, read_experiment, run_directory
from lockstep.experiment.run_scores import final_score
from lockstep.experiment.scheduler import is_finished
from lockstep.experiment.seed_runs import train_experiment
from lockstep.experiment.statistics import Estimate, Improvement, estimate, probability_of_improvement
from lockstep.io.jsonl import read_status
from lockstep.run_results import Run


@dataclass(frozen=True)
class Experiment:
    """Several runs of one recipe that differ only in their seed: what `lockstep.train` with `seeds` returns.

    `lockstep.Experiment(path)` opens an existing experiment. Every property reads the files again, so it also describes
    an experiment that another process trains.
    """

    path: Path
    """Absolute path of the directory that contains the run directories."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return read_experiment(self.path).seeds

    @property
    def runs(self) -> list[Run]:
        """The runs in the order of their seeds, also those that have not been started."""
        return [Run(run_directory(self.path, seed)) for seed in self.seeds]

    @property
    def status(self) -> str:
        """finished if all runs have finished, else running, failed, preempted or incomplete."""
        return overall_state([str(read_status(run.path).get("state", "-")) for run in self.runs])

    @property
    def scores(self) -> list[float]:
        """Final score of each finished run, in the order of the seeds. Higher is better.

        It is the mean return of the last evaluation, or its `score` on a data set. Without evaluations, it is the mean
        return of the last 100 training episodes.
        """
        found = (final_score(run.path) for run in self.runs if is_finished(run.path))
        return [score.value for score in found if score is not None]

    @property
    def estimate(self) -> Estimate | None:
        """Summary of the scores: `iqm` with its 95 % bootstrap `interval`, `mean`, `standard_deviation` and `runs`.

        None if no run has a score.
        """
        scores = self.scores
        return estimate([scores]) if scores else None

    def probability_of_improvement(self, other: "Experiment") -> Improvement:
        """Compare the scores with those of another experiment on the same task.

        Args:
            other: Experiment to compare with.

        Returns:
            `probability` that a run of this experiment scores higher than one of the other, where ties count half, and
            its 95 % bootstrap `interval`.

        Raises:
            ConfigError: One of the experiments has no finished run.
        """
        mine, theirs = self.scores, other.scores
        for experiment, scores in ((self, mine), (other, theirs)):
            if not scores:
                raise ConfigError(
                    f"{experiment.path} has no score.", f"Train it first: lockstep resume {experiment.path}"
                )
        return probability_of_improvement([mine], [theirs])

    def resume(self, *, procs: int | None = None, parallel: int | None = None) -> None:
        """Train the runs that have not finished. Interrupted runs continue from their newest checkpoints.

        Args:
            procs: Processes of each run. None: the number that the experiment was created with.
            parallel: Runs at a time. None: as many as the GPUs of the machine allow, or its cores if it has no GPU.

        Raises:
            ConfigError: Another process trains the experiment, or its file is invalid.
            RuntimeError: Some runs failed. The message names them and the files with their output.
        """
        failed = train_experiment(self.path, procs, parallel).failed
        if failed:
            logs = ", ".join(f"{run.label} ({run.log})" for run in failed)
            raise RuntimeError(f"{len(failed)} of {len(self.seeds)} runs failed: {logs}. Resume them with `resume`.")
