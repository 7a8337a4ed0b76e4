"""How far the trials of a sweep are, and what is to be trained next. Everything follows from their records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.config import ConfigError
from lockstep.sweeps.pruning import continues, rungs
from lockstep.sweeps.record import SweepRecord, TrialRecord, read_sweep, read_trials, trial_directory

State = Literal["ready", "waiting", "finished", "pruned", "failed"]


@dataclass(frozen=True)
class TrialState:
    """State of one trial."""

    state: State
    """ready: train it to `samples`. waiting: the decision at `samples` needs values of trials with lower numbers."""
    samples: int
    """Samples of the next rung if the trial is ready, else of its last one."""

    @property
    def is_decided(self) -> bool:
        """Whether the trial is trained no further."""
        return self.state in ("finished", "pruned", "failed")


def trial_states(record: SweepRecord, trials: Sequence[TrialRecord]) -> list[TrialState]:
    """Return the states of all trials, from the lowest number to the highest.

    A trial that may still get a value at a rung blocks the decisions about all higher trials at that rung. With `pbt`
    all trials wait for each other at every rung.
    """
    if record.prune == "pbt":
        return _population_states(record, trials)
    samples = rungs(record)
    values: list[list[float]] = [[] for _ in samples]  # by rung, of the trials so far
    blocked = len(samples)  # first rung at which a lower trial may still get a value
    states = []
    for trial in trials:
        state = _state(record, trial, samples, values, blocked)
        if not state.is_decided:
            blocked = min(blocked, samples.index(state.samples))
        states.append(state)
    return states


def _population_states(record: SweepRecord, trials: Sequence[TrialRecord]) -> list[TrialState]:
    samples = rungs(record)
    reached = [len(trial.values) + (trial.failure is not None) for trial in trials]
    slowest = min(reached, default=0) if len(trials) == record.trials else 0
    all_failed = all(trial.failure is not None for trial in trials)
    states = []
    for trial, number in zip(trials, reached, strict=True):
        if trial.failure is not None and (all_failed or number == len(samples)):
            states.append(TrialState("failed", samples[number - 1]))
        elif number == len(samples):
            states.append(TrialState("finished", samples[-1]))
        elif number > slowest or trial.failure is not None:
            states.append(TrialState("waiting", samples[number - 1]))
        else:
            states.append(TrialState("ready", samples[number]))
    return states


def _state(
    record: SweepRecord, trial: TrialRecord, samples: Sequence[int], values: list[list[float]], blocked: int
) -> TrialState:
    """Return the state of the next trial, and add its values to those of the rungs."""
    for number, rung in enumerate(samples):
        if number == len(trial.values):
            return TrialState("ready" if trial.failure is None else "failed", rung)
        value = trial.values[number]
        if rung == samples[-1]:
            break
        if number >= blocked:
            return TrialState("waiting", rung)
        if value is not None:  # without a value, the trial can neither be compared nor pruned
            if not continues(record, value, values[number]):
                values[number].append(value)
                return TrialState("pruned", rung)
            values[number].append(value)
    return TrialState("finished" if trial.failure is None else "failed", samples[-1])


def rank_trials(record: SweepRecord, trials: Sequence[TrialRecord]) -> list[int]:
    """Return the numbers of the trials, best first: finished ones by value, then pruned ones by samples and value."""
    order = ("finished", "pruned", "waiting", "ready", "failed")
    states = trial_states(record, trials)

    def rank(number: int) -> tuple[int, int, float, int]:
        state, values = states[number], trials[number].values
        value = values[-1] if values else None
        score = math.inf if value is None else -record.sign * value
        return order.index(state.state), -state.samples, score, number

    return sorted(range(len(trials)), key=rank)


def best_trial(record: SweepRecord, trials: Sequence[TrialRecord]) -> int | None:
    """Return the number of the finished trial with the best value, the lowest of equals; None if none has finished."""
    finished = [
        (record.sign * trial.values[-1], -number)
        for number, (trial, state) in enumerate(zip(trials, trial_states(record, trials), strict=True))
        if state.state == "finished" and trial.values[-1] is not None
    ]
    return -max(finished)[1] if finished else None


def best_run(sweep: Path) -> Path:
    """Return the run directory of the best trial. Raises ConfigError if no trial has finished."""
    trials = read_trials(sweep)
    number = best_trial(read_sweep(sweep), trials)
    if number is None:
        raise ConfigError(f"{sweep} has no finished trial yet.", f"Name one of its runs: lockstep ls {sweep}")
    return trial_directory(sweep, number, trials[number])
