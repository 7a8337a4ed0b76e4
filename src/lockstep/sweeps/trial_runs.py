"""Trials as runs: which run is trained next and how far, and what its log says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.format import replace_text
from lockstep.config import ConfigError, Recipe, apply_overrides
from lockstep.experiment.run_scores import MAX_ABS, final_score
from lockstep.experiment.scheduler import describe_active, has_reached, start_or_resume
from lockstep.inference import build_recipe
from lockstep.io.jsonl import METRICS, SWEEP, TRIALS, newest_values, read_status
from lockstep.sweeps.optuna_study import StudyFile, results_needed, suggest
from lockstep.sweeps.population import decide, make_copy, rung_to_decide
from lockstep.sweeps.progress import TrialState, best_trial, trial_states
from lockstep.sweeps.pruning import rungs
from lockstep.sweeps.record import (
    TRIAL_RUN,
    Copy,
    SweepRecord,
    TrialRecord,
    format_trials,
    read_trials,
    trial_directory,
)
from lockstep.sweeps.space import Space, parse_space

ATTEMPTS = 3
"""Starts of a trial after which an error is not taken for an accident, such as a kill."""
MakeCopy = Callable[[Path, Sequence[TrialRecord], Copy], None]
SCORE = "score"
"""Name of the default metric in messages and tables."""
MAX_FAILURE = 500
"""Characters of a failure that are recorded."""


@dataclass(frozen=True)
class TrialRun:
    """Run of one trial of a sweep, to be trained to its next rung."""

    number: int
    path: Path
    """Run directory."""
    steps: int
    """Global samples to train for."""
    procs: int
    is_last: bool
    """Whether the run ends at these samples."""

    @property
    def label(self) -> str:
        return self.path.name.replace("-", " ")

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.path.with_name(f"{self.path.name}.log")

    def prepare(self, gpus: Sequence[str]) -> list[str]:
        """Return the arguments of lockstep that start or resume the run on some GPUs. Empty: all visible ones."""
        start = ["train", TRIAL_RUN, str(self.path.parent), str(self.number), "--procs", str(self.procs)]
        return start_or_resume(self, start, None if self.is_last else self.steps, gpus)

    def is_done(self) -> bool:
        """Return whether the run has been saved at these samples, or has finished."""
        return has_reached(self.path, None if self.is_last else self.steps)


class TrialQueue:
    """The trials of a sweep, as the queue of a scheduler. Each result is recorded before the next run starts."""

    def __init__(
        self,
        sweep: Path,
        record: SweepRecord,
        procs: int,
        storage: str | None,
        skip_failed: bool,
        make_copy: MakeCopy = make_copy,
    ) -> None:
        """Read the trials so far.

        Args:
            sweep: Directory of the sweep.
            record: What it searches.
            procs: Processes of each trial.
            storage: URL of a database for a copy of the study. None: only the file.
            skip_failed: Record trials as failed that end with an error `ATTEMPTS` times.
            make_copy: Creates the run of a copy, for pbt.
        """
        self.trials = read_trials(sweep)
        self._sweep, self._record, self._procs, self._skip_failed = sweep, record, procs, skip_failed
        self._space, self._make_copy = sweep_space(sweep, record), make_copy
        self._study = StudyFile(sweep, record, self._space, storage)
        self._active: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._states: list[TrialState] = []
        self._changed()

    def take(self) -> TrialRun | None:
        """Return the unfinished trial with the lowest number that can be trained, or a new one."""
        while True:
            for number, state in enumerate(self._states):
                if state.state == "ready" and number not in self._active and not self._is_blocked(number):
                    self._active.add(number)
                    return self._run(number, state.samples)
            following = len(self.trials)
            known = self._states[: results_needed(self._record, following)]
            if following == self._record.trials or not all(state.is_decided for state in known):
                return None
            self._suggest()

    def is_done(self, run: TrialRun) -> bool:
        return run.is_done()

    def record(self, run: TrialRun) -> str:
        """Record the value of a run that has reached its rung. Return it as text, with the decisions that follow."""
        value = trial_value(run.path, self._record.metric)
        trial, before = self.trials[run.number], self._states
        copies = [len(each.copies) for each in self.trials]
        trial.values.append(value)
        if run.is_last and value is None:
            trial.failure = f"{self._record.metric or SCORE} was not logged as a finite number"
        self._active.discard(run.number)
        self._changed()
        shown = f"{self._record.metric or SCORE} {'-' if value is None else format(value, ',.4g')}"
        decided = [
            f"trial {number} {state.state}"
            for number, (state, old) in enumerate(zip(self._states, before, strict=True))
            if state.is_decided and not old.is_decided
        ]
        decided += [
            f"trial {number} continues from trial {each.copies[-1].parent}"
            for number, (each, count) in enumerate(zip(self.trials, copies, strict=True))
            if len(each.copies) > count
        ]
        return ", ".join([f"{shown} at {run.steps:,} samples", *decided])

    def handle_failure(self, run: TrialRun, code: int) -> str | None:
        """Record a trial with non-finite values as failed: they would come again. Repeat it after other errors."""
        self._active.discard(run.number)
        attempts = self._attempts[run.number] = self._attempts.get(run.number, 0) + 1
        why = nonfinite_failure(run.path)
        if why is None and attempts < ATTEMPTS:
            return f"ended with exit code {code}, attempt {attempts + 1} follows"
        if why is None and not self._skip_failed:
            return None
        why = why or f"exit code {code} in {ATTEMPTS} attempts"
        self.trials[run.number].failure = why[:MAX_FAILURE]
        self._changed()
        return f"failed: {why[:MAX_FAILURE]}"

    def describe(self, active: Sequence[TrialRun], done: int) -> str:
        decided = sum(state.is_decided for state in self._states)
        pruned = sum(state.state == "pruned" for state in self._states)
        best = best_trial(self._record, self.trials)
        shown = "" if best is None else f"; best {self.trials[best].values[-1]:,.4g} (trial {best})"
        return f"{decided} of {self._record.trials} trials done, {pruned} pruned; {describe_active(active)}{shown}"

    @property
    def is_complete(self) -> bool:
        """Whether all trials are decided."""
        return len(self.trials) == self._record.trials and all(state.is_decided for state in self._states)

    def _is_blocked(self, number: int) -> bool:
        return self._attempts.get(number, 0) >= ATTEMPTS

    def _run(self, number: int, samples: int) -> TrialRun:
        path = trial_directory(self._sweep, number, self.trials[number]).absolute()
        return TrialRun(number, path, samples, self._procs, samples == self._record.total_samples)

    def _suggest(self) -> None:
        """Add a trial. Settings that the recipe refuses make a failed trial."""
        number = len(self.trials)
        trial = TrialRecord(suggest(self._record, self._space, self.trials))
        self.trials.append(trial)
        try:
            trial_recipe(self._sweep, self._record, trial, number)
        except ConfigError as error:
            trial.failure = str(error)[:MAX_FAILURE]
        self._changed()

    def _changed(self) -> None:
        """Record the trials durably, before a run starts that depends on them."""
        if self._record.prune == "pbt" and (rung := rung_to_decide(self._record, self.trials)) is not None:
            self._replace_worst(rung)
        if self.trials:
            replace_text(self._sweep / TRIALS, format_trials(self.trials))
        self._make_copies()
        self._states = trial_states(self._record, self.trials)
        self._study.update(self.trials)

    def _replace_worst(self, rung: int) -> None:
        """pbt: let the worst trials continue from copies of the best. A failed trial has no value at this rung."""
        samples = rungs(self._record)[rung]
        for copy in decide(self._record, self._space, self.trials, rung):
            trial = self.trials[copy.number]
            if trial.copies and trial.copies[-1].samples == samples:
                continue  # decided before an interruption
            if trial.failure is not None:
                trial.values.append(None)
            trial.settings, trial.failure = copy.settings, None
            trial.copies.append(copy)

    def _make_copies(self) -> None:
        """pbt: create the runs of new copies. No trial has trained on, so each parent still has its checkpoint."""
        samples = rungs(self._record)
        for trial in self.trials:
            if trial.copies and trial.values and trial.copies[-1].samples == samples[len(trial.values) - 1]:
                self._make_copy(self._sweep, self.trials, trial.copies[-1])


def sweep_space(sweep: Path, record: SweepRecord) -> Space:
    """Return the search space of a sweep, checked again: its file may be untrusted."""
    recipe = build_recipe(sweep / SWEEP, record.recipe, record.settings)
    return parse_space(record.space, recipe, str(sweep / SWEEP))


def trial_recipe(sweep: Path, record: SweepRecord, trial: TrialRecord, number: int) -> Recipe:
    """Return the recipe of a trial.

    Raises:
        ConfigError: The settings cannot be used together.
    """
    recipe = build_recipe(sweep / SWEEP, record.recipe, record.settings)
    path = trial_directory(sweep, number, trial).absolute()
    location = {"run": {"runs_dir": str(path.parent), "name": path.name}}
    recipe = apply_overrides(apply_overrides(recipe, trial.settings), location)
    task = recipe.task.for_lanes(recipe.run.lanes) if hasattr(recipe.task, "for_lanes") else recipe.task
    recipe.algo.validate(task, recipe.run)
    return recipe


def nonfinite_failure(run: Path) -> str | None:
    """Return why a run failed if its training became non-finite: it would again. None for other errors."""
    status = read_status(run)
    why = str(status.get("why", ""))
    return why if status.get("state") == "failed" and why.startswith("NonFiniteError") else None


def trial_value(run: Path, metric: str | None) -> float | None:
    """Return the newest value of a metric in the log of a run; None if it is missing or not finite."""
    if metric is None:
        score = final_score(run)
        return None if score is None else score.value
    value = newest_values(run / METRICS, [metric]).get(metric)
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_ABS else None
