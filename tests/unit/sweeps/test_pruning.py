"""Decisions about trials: they are those of Optuna for trials one after another, and need only lower numbers."""

import random

import optuna
import pytest

from lockstep.sweeps.progress import best_trial, trial_states
from lockstep.sweeps.pruning import default_min_samples, rungs
from lockstep.sweeps.record import SweepRecord, TrialRecord

VALUES = {"recipe": "r", "command": "c", "space": {}, "procs": 1, "metric": None, "sampler": "tpe", "seed": 0}
VALUES |= {"settings": {"run": {"total_samples": 900}}, "window": 4, "trials": 40}


def record(prune="asha", direction="maximize", eta=3):
    minimum = default_min_samples(prune, 900, eta)
    return SweepRecord(**VALUES, prune=prune, direction=direction, eta=eta, min_samples=minimum)


def train_in_random_order(plan, curves, seed):
    """Train trials in a random order, as far as the decisions allow. Return their records."""
    order, trials = random.Random(seed), [TrialRecord({}) for _ in curves]
    while ready := [n for n, state in enumerate(trial_states(plan, trials)) if state.state == "ready"]:
        number = order.choice(ready)
        trials[number].values.append(curves[number][len(trials[number].values)])
    return trials


def optuna_one_after_another(plan, curves):
    """Return the number of values of each trial under Optuna's successive halving."""
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=plan.min_samples, reduction_factor=plan.eta)
    study = optuna.create_study(direction=plan.direction, pruner=pruner)
    trained = []
    for curve in curves:
        trial, values = study.ask(), 0
        for samples, value in zip(rungs(plan), curve, strict=True):
            values += 1
            if samples < 900:
                trial.report(value, samples)
                if trial.should_prune():
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    break
        else:
            study.tell(trial, curve[-1])
        trained.append(values)
    return trained


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
@pytest.mark.parametrize("eta", [2, 3])
def test_asha_in_any_order_decides_as_optuna_one_after_another(direction, eta):
    draw, plan = random.Random(eta), record(direction=direction, eta=eta)
    curves = [[draw.randrange(8) for _ in rungs(plan)] for _ in range(30)]
    expected = optuna_one_after_another(plan, curves)
    assert len({*expected}) == len(rungs(plan))
    for seed in range(5):
        trials = train_in_random_order(plan, curves, seed)
        assert [len(trial.values) for trial in trials] == expected
        assert all(state.is_decided for state in trial_states(plan, trials))


@pytest.mark.parametrize("prune", ["median", "none"])
def test_decisions_do_not_depend_on_order(prune):
    draw, plan = random.Random(0), record(prune)
    curves = [[draw.random() for _ in rungs(plan)] for _ in range(20)]
    first = train_in_random_order(plan, curves, 0)
    assert all(train_in_random_order(plan, curves, seed) == first for seed in range(1, 5))
    states = {state.state for state in trial_states(plan, first)}
    assert states == ({"finished", "pruned"} if prune == "median" else {"finished"})


def test_rungs_of_each_pruner():
    assert rungs(record()) == [100, 300, 900]
    assert rungs(record(eta=2)) == [225, 450, 900]
    assert rungs(record("median")) == [225, 450, 675, 900]
    assert rungs(record("none")) == [900]


def test_median_keeps_the_first_trials_and_those_at_the_median():
    curves = [[value] * 4 for value in (1, 2, 3, 4, 5, 2.9, 3)]
    states = trial_states(record("median"), train_in_random_order(record("median"), curves, 0))
    assert [state.state for state in states] == ["finished"] * 5 + ["pruned", "finished"]
    lower = trial_states(record("median", "minimize"), train_in_random_order(record("median", "minimize"), curves, 0))
    assert [state.state for state in lower] == ["finished"] * 6 + ["pruned"]


def test_trial_waits_only_for_lower_numbers():
    trials = [TrialRecord({}), TrialRecord({}, [5.0]), TrialRecord({}, [6.0])]
    assert [state.state for state in trial_states(record(), trials)] == ["ready", "waiting", "waiting"]
    trials[0].values = [1.0]  # the first trial always continues, and may reach the second rung
    states = trial_states(record(), trials)
    assert [(state.state, state.samples) for state in states] == [("ready", 300)] * 3
    trials[2].values = [6.0, 6.0]
    assert trial_states(record(), trials)[2].state == "waiting"


def test_trial_without_a_value_is_not_compared():
    trials = [TrialRecord({}, [9.0]), TrialRecord({}, [None]), TrialRecord({}, [1.0])]
    assert [state.state for state in trial_states(record(), trials)] == ["ready", "ready", "pruned"]


def test_failed_trial_blocks_no_decision():
    trials = [TrialRecord({}, [], "non-finite loss"), TrialRecord({}, [1.0])]
    assert [state.state for state in trial_states(record(), trials)] == ["failed", "ready"]


def test_best_trial_is_the_first_of_equals():
    trials = [TrialRecord({}, [value]) for value in (1.0, 3.0, 3.0, 2.0)]
    assert best_trial(record("none"), trials) == 1
    assert best_trial(record("none", "minimize"), trials) == 0
    assert best_trial(record("none"), [TrialRecord({}, [])]) is None
