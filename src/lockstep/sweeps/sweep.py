"""Results of a sweep as plain data, read from its directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.io.jsonl import read_status
from lockstep.run_results import Run
from lockstep.sweeps.progress import best_trial, rank_trials, trial_states
from lockstep.sweeps.record import read_sweep, read_trials, trial_directory
from lockstep.sweeps.sweep_runs import train_sweep


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep."""

    number: int
    state: str
    """finished, pruned or failed; ready or waiting if it is not decided yet."""
    samples: int
    """Global samples of the value. Of a trial without one: the samples to train for."""
    value: float | None
    """Last value of the metric. None: there is none yet, or the trial failed."""
    settings: dict[str, Any]
    """Searched settings by dotted name."""
    run: Run
    """Run of the trial, which `lockstep.resume` and `lockstep.fork` continue."""
    failure: str | None
    """Why the trial failed. None: it did not."""


@dataclass(frozen=True)
class Sweep:
    """A search for good settings: what `lockstep.sweep` returns.

    `lockstep.Sweep(path)` opens an existing sweep. Every property reads the files again, so it also describes a sweep
    that another process trains.
    """

    path: Path
    """Absolute path of the directory that contains the trials."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def trials(self) -> list[Trial]:
        """The trials so far, in the order of their numbers."""
        record, trials = read_sweep(self.path), read_trials(self.path)
        return [
            Trial(
                number=number,
                state=state.state,
                samples=state.samples,
                value=trial.values[-1] if trial.values and trial.failure is None else None,
                settings=trial.settings,
                run=Run(trial_directory(self.path, number, trial)),
                failure=trial.failure,
            )
            for number, (trial, state) in enumerate(zip(trials, trial_states(record, trials), strict=True))
        ]

    @property
    def ranking(self) -> list[Trial]:
        """The trials, best first: finished ones by value, then pruned ones by samples and value, then the others."""
        trials = self.trials
        return [trials[number] for number in rank_trials(read_sweep(self.path), read_trials(self.path))]

    @property
    def table(self) -> list[dict[str, Any]]:
        """One dict per trial with its results and settings, best first: `pandas.DataFrame(sweep.table)`."""
        return [
            {"trial": trial.number, "state": trial.state, "samples": trial.samples, "value": trial.value}
            | trial.settings
            for trial in self.ranking
        ]

    @property
    def best(self) -> Trial | None:
        """The finished trial with the best value, the first of equals; None if none has finished."""
        trials = read_trials(self.path)
        number = best_trial(read_sweep(self.path), trials)
        return None if number is None else self.trials[number]

    @property
    def status(self) -> str:
        """finished if all trials are decided, running if one is being trained, else incomplete."""
        trials = self.trials
        if len(trials) == read_sweep(self.path).trials and all(
            trial.state in ("finished", "pruned", "failed") for trial in trials
        ):
            return "finished"
        states = [read_status(trial.run.path).get("state") for trial in trials]
        return "running" if "running" in states else "incomplete"

    def resume(
        self,
        *,
        procs: int | None = None,
        parallel: int | None = None,
        storage: str | None = None,
        skip_failed: bool = False,
    ) -> None:
        """Train the trials that are not decided. Interrupted ones continue from their newest checkpoints.

        Args:
            procs: Processes of each trial. None: the number that the sweep was created with.
            parallel: Trials at a time. None: as many as the GPUs of the machine allow, or its cores if it has no GPU.
            storage: URL of a database for a copy of the study. None: only the file in the directory.
            skip_failed: Record trials as failed that end with an error in three attempts.

        Raises:
            ConfigError: Another process trains the sweep, or its file is invalid.
            RuntimeError: Some trials ended with an error. The message names them and the files with their output.
        """
        failed = train_sweep(self.path, procs, parallel, storage, skip_failed).failed
        if failed:
            logs = ", ".join(f"{run.label} ({run.log})" for run in failed)
            raise RuntimeError(
                f"{len(failed)} trials ended with an error: {logs}. Call `resume` again, or with skip_failed=True."
            )
