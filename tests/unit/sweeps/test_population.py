"""Population-based training: decisions are a function of the values, whatever the order, kills and failures."""

import itertools
import json
import shutil

import numpy as np
import pytest

from helpers.fake_trials import FakeTrials, Killed
from lockstep.config import ConfigError, apply_overrides
from lockstep.experiment import scheduler
from lockstep.registry import find_recipe
from lockstep.sweeps.population import decide, explore, rung_to_decide
from lockstep.sweeps.progress import best_run, trial_states
from lockstep.sweeps.pruning import rungs
from lockstep.sweeps.record import TrialRecord, read_sweep, read_trials, trial_directory
from lockstep.sweeps.space import Choices, Range
from lockstep.sweeps.sweep import Sweep
from lockstep.sweeps.sweep_runs import add_trials, create_sweep, plan_sweep, train_sweep

SPACE = {"algo.learning_rate": {"low": "1e-5", "high": 0.1, "log": True}, "algo.gamma": [0.9, 0.99]}
PLAN = {
    "trials": 8,
    "metric": None,
    "direction": "maximize",
    "prune": "pbt",
    "min_samples": 300,
    "eta": 3,
    "sampler": "tpe",
    "seed": 1,
    "window": 4,
    "procs": 1,
    "command": "lockstep sweep gym-ppo",
}


@pytest.fixture
def create(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.0)

    def create_one(name="sweep", space=SPACE, **changes):
        run = {"runs_dir": str(tmp_path), "name": name, "total_samples": 900, "device": "cpu"}
        settings = {"task.num_envs": 10, "algo.rollout_steps": 30, "algo.batch_size": 100}  # 300 samples per iteration
        settings |= {name: changes.pop(name) for name in list(changes) if "." in name}
        recipe = apply_overrides(find_recipe("gym-ppo")(), {"run": run, "run.lanes": 1, **settings})
        return create_sweep(recipe, plan_sweep(recipe, space, **PLAN | changes))

    return create_one


def copy_files(sweep, trials, copy):
    """Substitute for a fork: the files of the parent."""
    path = trial_directory(sweep, copy.number, trials[copy.number])
    if not path.exists():
        shutil.copytree(trial_directory(sweep, copy.parent, trials[copy.parent]), path)


def train(sweep, **settings):
    training = FakeTrials(sweep, **settings)
    return train_sweep(sweep, parallel=3, start=training, make_copy=copy_files, skip_failed=True), training


def results(sweep):
    return json.loads((sweep / "trials.json").read_text())["trials"]


@pytest.fixture
def undisturbed(create):
    sweep = create("undisturbed")
    train(sweep)
    return sweep


def test_worst_quarter_continues_from_copies_of_the_best(undisturbed):
    record, trials = read_sweep(undisturbed), read_trials(undisturbed)
    assert rungs(record) == [300, 600, 900]
    assert [state.state for state in trial_states(record, trials)] == ["finished"] * 8
    for rung, samples in enumerate((300, 600)):
        order = sorted(range(8), key=lambda number: -trials[number].values[rung])
        copied = {number: copy for number, t in enumerate(trials) for copy in t.copies if copy.samples == samples}
        assert sorted(copied) == sorted(order[-2:])
        assert all(copy.parent in order[:2] for copy in copied.values())
    copy = next(trial for trial in trials if trial.copies)
    assert copy.settings == copy.copies[-1].settings


def test_best_run_is_that_of_the_last_copy(undisturbed):
    trials = Sweep(undisturbed).trials
    best = max(trials, key=lambda trial: trial.value)
    assert best_run(undisturbed) == best.run.path
    assert {trial.run.path.name.count("copy") for trial in trials} == {0, 1}


@pytest.mark.parametrize("seed", range(3))
def test_order_of_ends_does_not_change_results(create, undisturbed, seed):
    sweep = create()
    train(sweep, seed=seed)
    assert results(sweep) == results(undisturbed)


def test_kills_do_not_change_results(create, undisturbed):
    sweep = create()
    for seed in itertools.count():
        try:
            train(sweep, seed=seed, kill_after=2)
            break
        except Killed:
            assert seed < 50
    assert results(sweep) == results(undisturbed)


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_kill_at_a_copy_does_not_change_results(create, undisturbed, moment):
    sweep, calls = create(), []

    def kill_at_the_second(directory, trials, copy):
        calls.append(copy)
        if moment == "after the copy":
            copy_files(directory, trials, copy)
        if len(calls) == 2:
            raise Killed
        copy_files(directory, trials, copy)

    with pytest.raises(Killed):
        train_sweep(sweep, parallel=2, start=FakeTrials(sweep), make_copy=kill_at_the_second)
    train(sweep)
    assert results(sweep) == results(undisturbed)


def test_failed_trial_is_replaced_at_the_next_rung(create):
    sweep = create()
    train(sweep, failures={2: 1}, why="NonFiniteError: nan")
    trials = read_trials(sweep)
    assert trials[2].values[0] is None
    assert trials[2].failure is None
    assert trials[2].copies[0].samples == 300
    assert len(trials[2].values) == 3


def test_population_that_fails_as_a_whole_ends(create):
    sweep = create(trials=2)
    train(sweep, failures={0: 9, 1: 9}, why="NonFiniteError: nan")
    assert [state.state for state in trial_states(read_sweep(sweep), read_trials(sweep))] == ["failed", "failed"]


def test_settings_that_a_fork_cannot_change_are_refused(create):
    with pytest.raises(ConfigError, match=r"algo\.rollout_steps cannot change while a run trains"):
        create(space={"algo.rollout_steps": [8, 16]})
    with pytest.raises(ConfigError, match=r"run\.seed cannot change"):
        create(space={"run.seed": [0, 1]})


def test_rungs_are_whole_iterations_apart(create):
    settings = {"task.num_envs": 8, "algo.rollout_steps": 32, "algo.batch_size": 64}
    record = read_sweep(create(min_samples=None, **settings))
    assert rungs(record) == [256, 512, 768, 900]  # a tenth would be 90, and 810 is in the last iteration
    assert rungs(read_sweep(create("long", min_samples=900, **settings))) == [900]


def test_population_of_one_and_added_trials_are_refused(create):
    with pytest.raises(ConfigError, match="2 trials or more"):
        create(trials=1)
    sweep = create()
    with pytest.raises(ConfigError, match="has 8 trials"):
        add_trials(sweep, 9)


def test_no_decision_before_all_trials_have_a_value(create):
    record = read_sweep(create(trials=3))
    trials = [TrialRecord({"a": 1}, [1.0]), TrialRecord({"a": 1}, [2.0])]
    assert rung_to_decide(record, trials) is None
    assert rung_to_decide(record, [*trials, TrialRecord({"a": 1})]) is None
    assert rung_to_decide(record, [*trials, TrialRecord({"a": 1}, [0.0])]) == 0
    assert rung_to_decide(record, [*trials, TrialRecord({"a": 1}, [], "failed")]) == 0
    assert rung_to_decide(record, [TrialRecord({"a": 1}, [1.0, 1.0, 1.0])] * 3) is None  # the end


def test_equal_trials_are_not_copied(create):
    record = read_sweep(create())
    assert decide(record, {}, [TrialRecord({}, [1.0])] * 8, 0) == []


def test_explored_settings_stay_in_their_space():
    draw = np.random.default_rng(0)
    domains = [
        (Range(low=1e-5, high=0.1, log=True), 0.09),
        (Range(low=0.0, high=1.0), 0.5),
        (Range(low=1, high=12), 1),
        (Range(low=2, high=13, step=3), 5),
        (Choices(("a", "b", "c")), "b"),
    ]
    for domain, setting in domains:
        seen = [explore(domain, setting, draw) for _ in range(400)]
        assert len(set(seen)) > 1
        if isinstance(domain, Choices):
            assert set(seen) == {"a", "b", "c"}
            assert seen.count("b") > 250  # a choice is kept, except if it is drawn again
            continue
        assert all(domain.low <= value <= domain.high for value in seen)
        assert {type(value) for value in seen} == {type(domain.low)}
        if domain.step:
            assert set(seen) <= {2, 5, 8, 11}
    assert {explore(Range(low=1, high=9), 3, draw) for _ in range(100)} >= {2, 4}


def test_files_with_invalid_copies_are_refused(undisturbed):
    path = undisturbed / "trials.json"
    values = json.loads(path.read_text())
    trial = next(trial for trial in values["trials"] if trial.get("copies"))
    for broken in ([1], [{"number": 0}], [trial["copies"][0] | {"samples": -1}], "x"):
        trial["copies"] = broken
        path.write_text(json.dumps(values))
        with pytest.raises(ConfigError, match="is not the file of the trials"):
            read_trials(undisturbed)
    trial["copies"] = [{"number": 0, "parent": 8, "samples": 300, "settings": {}}]
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="has a copy of a trial that does not exist"):
        read_trials(undisturbed)
