"""Optuna: suggestions of settings, and a study of the decided trials that Optuna's tools can open.

Optuna keeps no state that a sweep depends on. Suggestions are computed from the records of the trials, with a random
stream for each trial. The study is a copy: it is written again when a sweep is resumed.
"""

import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import ConfigError
from lockstep.sweeps.progress import TrialState, trial_states
from lockstep.sweeps.pruning import rungs
from lockstep.sweeps.record import SweepRecord, TrialRecord
from lockstep.sweeps.space import Choices, Space, choice_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

STUDY = "study.journal"
"""File of the study in the directory of a sweep."""
IMPORTANCE_TRIALS = 10
"""Trials with a value below which no importance is estimated."""
TPE_STARTUP = 10
"""Trials with random settings before TPE uses results, as in Optuna."""


def require_optuna() -> None:
    """Raise ConfigError if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ConfigError("lockstep sweep needs Optuna.", 'Install it: pip install "lockstep-rl[sweep]"') from None


def results_needed(record: SweepRecord, number: int) -> int:
    """Return how many trials must be decided before a trial is suggested: those with numbers below the result."""
    known = max(0, number - record.window + 1)
    return known if record.sampler == "tpe" and known >= TPE_STARTUP else 0


def suggest(record: SweepRecord, space: Space, trials: Sequence[TrialRecord]) -> dict[str, Any]:
    """Return the settings of the next trial, whose number is that of the trials so far.

    They depend on the record, on this number and on the results of `results_needed` trials.
    """
    import optuna

    from lockstep.rng import stable_hash  # imports torch, which reports of sweeps do not need

    number = len(trials)
    stream = stable_hash("sweep", record.seed, number) % 2**32
    distributions = {name: _distribution(space[name]) for name in space}
    with _quiet():
        sampler = (
            optuna.samplers.TPESampler(n_startup_trials=TPE_STARTUP, seed=stream)
            if record.sampler == "tpe"
            else optuna.samplers.RandomSampler(seed=stream)
        )
        study = optuna.create_study(direction=record.direction, sampler=sampler)
        study.add_trials(_frozen_trials(record, space, trials[: results_needed(record, number)], failed_as_worst=True))
        params = study.ask(distributions).params
    return {name: _setting(space[name], params[name]) for name in space}


def setting_importances(record: SweepRecord, space: Space, trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Return the share of each setting in the differences of the values at the first rung, by PED-ANOVA.

    The first rung has a value of every trial. Empty with fewer than 10 of them, without Optuna, or if settings change
    in a trial.
    """
    if record.prune == "pbt":
        return {}
    try:
        import optuna
    except ImportError:
        return {}
    compared = [trial for trial in trials if trial.values and trial.values[0] is not None]
    if len(compared) < IMPORTANCE_TRIALS:
        return {}
    distributions = {name: _distribution(space[name]) for name in space}
    with _quiet():
        study = optuna.create_study(direction=record.direction)
        study.add_trials(
            [
                optuna.trial.create_trial(
                    value=trial.values[0],
                    params={name: _param(space, name, trial.settings[name]) for name in space},
                    distributions=distributions,
                )
                for trial in compared
            ]
        )
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(study, evaluator=evaluator)


class StudyFile:
    """Copies decided trials to a study: a journal file in the directory of the sweep, and a database on request."""

    def __init__(self, sweep: Path, record: SweepRecord, space: Space, storage: str | None) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        self._record, self._space = record, space
        journal = sweep / STUDY
        for old in (journal, journal.with_name(f"{STUDY}.lock")):  # a kill may have left half a line, and the lock
            old.unlink(missing_ok=True)
        with _quiet():
            storages: list[Any] = [optuna.storages.JournalStorage(JournalFileBackend(str(journal)))]
            storages += [] if storage is None else [_open_database(storage)]
            self._studies = [
                optuna.create_study(
                    storage=each, study_name=sweep.name, direction=record.direction, load_if_exists=True
                )
                for each in storages
            ]

    def update(self, trials: Sequence[TrialRecord]) -> None:
        """Add decided trials that the studies do not have, in the order of their numbers."""
        states = trial_states(self._record, trials)
        decided = next((number for number, state in enumerate(states) if not state.is_decided), len(states))
        with _quiet():
            for study in self._studies:
                known = len(study.get_trials(deepcopy=False))
                if known < decided:
                    study.add_trials(_frozen_trials(self._record, self._space, trials[:decided])[known:])


def _frozen_trials(
    record: SweepRecord, space: Space, trials: Sequence[TrialRecord], failed_as_worst: bool = False
) -> "list[FrozenTrial]":
    """Return decided trials as Optuna's. TPE ignores failed trials, but ranks pruned ones without a value last."""
    from optuna.trial import TrialState as OptunaState
    from optuna.trial import create_trial

    states = {"finished": OptunaState.COMPLETE, "pruned": OptunaState.PRUNED, "failed": OptunaState.FAIL}
    states |= {"failed": OptunaState.PRUNED} if failed_as_worst else {}
    distributions = {name: _distribution(space[name]) for name in space}
    frozen = []
    for trial, state in zip(trials, trial_states(record, trials), strict=True):
        values = trial.values if trial.failure is None else []
        frozen.append(
            create_trial(
                state=states[state.state],
                value=trial.values[-1] if state.state == "finished" else None,
                params={name: _param(space, name, trial.settings[name]) for name in space},
                distributions=distributions,
                intermediate_values={
                    rung: value for rung, value in zip(rungs(record), values, strict=False) if value is not None
                },
                user_attrs=_attributes(trial, state),
            )
        )
    return frozen


def _attributes(trial: TrialRecord, state: TrialState) -> dict[str, Any]:
    return {"samples": state.samples} | ({} if trial.failure is None else {"failure": trial.failure})


def _distribution(domain: Any) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(domain, Choices):
        return CategoricalDistribution([choice_key(value) for value in domain.values])
    if domain.is_integer:
        return IntDistribution(int(domain.low), int(domain.high), log=domain.log, step=int(domain.step or 1))
    return FloatDistribution(domain.low, domain.high, log=domain.log, step=domain.step)


def _param(space: Space, name: str, setting: Any) -> Any:
    return choice_key(setting) if isinstance(space[name], Choices) else setting


def _setting(domain: Any, param: Any) -> Any:
    if isinstance(domain, Choices):
        return next(value for value in domain.values if choice_key(value) == param)
    return param


def _open_database(url: str) -> Any:
    import optuna

    try:
        return optuna.storages.get_storage(url)
    except Exception as error:  # of SQLAlchemy, or of the driver of the database, which may not be installed
        raise ConfigError(
            f"--storage {url.partition('://')[0]} cannot be opened: {type(error).__name__}.",
            "Use a URL of SQLAlchemy, such as sqlite:///study.db, and install the driver of the database.",
        ) from None


@contextmanager
def _quiet() -> "Iterator[None]":
    """Silence Optuna's log and its warnings about finite steps, which would interrupt the progress line."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            yield
    finally:
        optuna.logging.set_verbosity(level)
