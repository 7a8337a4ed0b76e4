"""Training of a sweep, with a substitute for training: results do not depend on order, kills or failures."""

import json

import optuna
import pytest
import yaml

from helpers.fake_trials import FakeTrials, Killed
from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.experiment import scheduler
from lockstep.experiment.lock import locked
from lockstep.registry import find_recipe
from lockstep.sweeps.progress import best_run
from lockstep.sweeps.record import read_sweep, read_trials
from lockstep.sweeps.sweep import Sweep
from lockstep.sweeps.sweep_runs import add_trials, create_sweep, plan_sweep, train_sweep, write_best
from lockstep.sweeps.trial_runs import trial_recipe

SPACE = {"algo.learning_rate": {"low": "1e-5", "high": 0.1, "log": True}, "algo.gamma": [0.9, 0.99]}
PLAN = {
    "trials": 16,
    "metric": None,
    "direction": "maximize",
    "prune": "asha",
    "min_samples": None,
    "eta": 2,
    "sampler": "tpe",
    "seed": 1,
    "window": 4,
    "procs": 1,
    "command": "lockstep sweep\x1b gym-ppo",
}


@pytest.fixture
def create(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.0)

    def create_one(name="sweep", **changes):
        run = {"runs_dir": str(tmp_path), "name": name, "total_samples": 900, "device": "cpu"}
        recipe = apply_overrides(find_recipe("gym-ppo")(), {"run": run, "run.lanes": 8})
        return create_sweep(recipe, plan_sweep(recipe, SPACE, **PLAN | changes))

    return create_one


def results(sweep):
    return json.loads((sweep / "trials.json").read_text())["trials"]


@pytest.fixture
def undisturbed(create):
    sweep = create("undisturbed")
    train_sweep(sweep, parallel=1, start=FakeTrials(sweep))
    return results(sweep)


def test_sweep_prunes_trials_and_finds_the_best(create):
    sweep = create()
    training = FakeTrials(sweep)
    outcome = train_sweep(sweep, parallel=3, start=training)
    assert (outcome.failed, outcome.stopped, training.most) == ([], False, 3)
    found = Sweep(sweep)
    states = [trial.state for trial in found.trials]
    assert (found.status, len(states), {*states}) == ("finished", 16, {"pruned", "finished"})
    assert {trial.samples for trial in found.trials} == {225, 450, 900}
    assert found.best.value == max(trial.value for trial in found.trials if trial.state == "finished")
    assert found.table[0]["trial"] == found.best.number
    assert found.table[0]["algo.learning_rate"] == found.best.settings["algo.learning_rate"]
    assert best_run(sweep) == found.best.run.path
    again = FakeTrials(sweep)
    train_sweep(sweep, start=again)
    assert again.started == []


def test_fork_of_sweep_without_finished_trial_is_refused(create, capsys):
    sweep = create()
    assert main(["fork", str(sweep), "run.total_samples=2000"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "has no finished trial yet" in error
    assert "Name one of its runs" in error


@pytest.mark.parametrize(("seed", "parallel"), [(1, 2), (2, 5), (3, 16)])
def test_results_do_not_depend_on_order_or_parallel(create, undisturbed, seed, parallel):
    sweep = create()
    training = FakeTrials(sweep, seed)
    train_sweep(sweep, parallel=parallel, start=training)
    assert training.most > 1
    assert results(sweep) == undisturbed


def test_sweep_killed_after_every_start_has_the_same_results(create, undisturbed):
    sweep, kills = create(), 0
    while True:
        try:
            train_sweep(sweep, parallel=2, start=FakeTrials(sweep, kills, kill_after=2))
        except Killed:
            kills += 1
            continue
        break
    assert kills >= 10
    assert results(sweep) == undisturbed


def test_killed_trial_is_trained_again_with_the_same_results(create, undisturbed):
    sweep = create()
    outcome = train_sweep(sweep, parallel=2, start=FakeTrials(sweep, failures={0: 2, 5: 1}))
    assert outcome.failed == []
    assert results(sweep) == undisturbed


def test_trial_with_nonfinite_values_fails_without_another_attempt(create):
    sweep = create(trials=4)
    training = FakeTrials(sweep, failures={1: 9}, why="NonFiniteError: the loss is nan")
    assert train_sweep(sweep, parallel=1, start=training).failed == []
    trial = Sweep(sweep).trials[1]
    assert (trial.state, trial.value, trial.failure) == ("failed", None, "NonFiniteError: the loss is nan")
    assert sum(arguments[3] == "1" for arguments in training.started if arguments[0] == "train") == 1
    assert Sweep(sweep).status == "finished"


def test_trial_that_always_fails_stops_the_sweep_or_is_skipped(create):
    sweep = create(trials=6, window=1)
    outcome = train_sweep(sweep, parallel=1, start=FakeTrials(sweep, failures={2: 9}))
    assert [run.number for run in outcome.failed] == [2]
    assert Sweep(sweep).status == "incomplete"
    train_sweep(sweep, parallel=1, skip_failed=True, start=FakeTrials(sweep, failures={2: 9}))
    assert Sweep(sweep).trials[2].failure == "exit code 1 in 3 attempts"
    assert Sweep(sweep).status == "finished"


def test_sweep_with_more_trials_equals_one_created_with_them(create, undisturbed):
    sweep = create(trials=7)
    train_sweep(sweep, start=FakeTrials(sweep))
    assert results(sweep) == undisturbed[:7]
    add_trials(sweep, 16)
    train_sweep(sweep, start=FakeTrials(sweep))
    assert results(sweep) == undisturbed
    with pytest.raises(ConfigError, match=r"--trials is 5, but .* has 16"):
        add_trials(sweep, 5)


def test_settings_that_the_recipe_refuses_make_a_failed_trial(create, monkeypatch):
    sweep = create(trials=1)
    refused = ConfigError("algo.learning_rate is too high.")
    monkeypatch.setattr("lockstep.sweeps.trial_runs.trial_recipe", lambda *arguments: (_ for _ in ()).throw(refused))
    training = FakeTrials(sweep)
    train_sweep(sweep, start=training)
    assert (training.started, Sweep(sweep).trials[0].failure) == ([], "algo.learning_rate is too high.")


def test_study_can_be_opened_by_optuna(create, tmp_path):
    sweep = create(trials=4)
    (sweep / "study.journal").write_text('{"half a line')
    database = f"sqlite:///{tmp_path / 'study.db'}"
    train_sweep(sweep, storage=database, start=FakeTrials(sweep))
    journal = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(sweep / "study.journal")))
    trials = Sweep(sweep).trials
    for storage in (journal, database):
        study = optuna.load_study(study_name="sweep", storage=storage)
        assert study.best_trial.number == Sweep(sweep).best.number
        assert [trial.params for trial in study.trials] == [trial.settings for trial in trials]
        states = {"COMPLETE": "finished", "PRUNED": "pruned"}
        assert [states[trial.state.name] for trial in study.trials] == [trial.state for trial in trials]


def test_best_settings_are_written_for_train(create):
    sweep = create()
    train_sweep(sweep, start=FakeTrials(sweep))
    record, best = read_sweep(sweep), Sweep(sweep).best
    written = write_best(sweep, best.number)
    recipe = apply_overrides(find_recipe("gym-ppo")(), yaml.safe_load(written.read_text()))
    assert recipe.algo == trial_recipe(sweep, record, read_trials(sweep)[best.number], best.number).algo
    assert recipe.algo.learning_rate == best.settings["algo.learning_rate"]


def test_sweep_is_trained_by_one_process_at_a_time(create):
    sweep = create()
    with locked(sweep, "sweep"), pytest.raises(ConfigError, match="another process trains the sweep"):
        train_sweep(sweep, start=FakeTrials(sweep))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"trials": 0}, "--trials is 0"),
        ({"eta": 1}, "--eta is 1"),
        ({"window": 0}, "--window is 0"),
        ({"min_samples": 1000}, "--min-samples is 1000"),
        ({"prune": "best"}, "prune is 'best'"),
    ],
)
def test_invalid_plan_is_refused(create, change, problem):
    with pytest.raises(ConfigError, match=problem):
        create(**change)


def test_command_refuses_what_a_sweep_cannot_change(create, capsys):
    sweep = create()
    assert main(["sweep", str(sweep), "--eta", "4"]) == 2
    assert "--eta cannot be changed when the sweep" in capsys.readouterr().err
    assert main(["sweep", str(sweep), "algo.gamma=0.5"]) == 2
    assert "algo.gamma=0.5 cannot be changed" in capsys.readouterr().err
    assert main(["resume", str(sweep), "--stop-at", "100"]) == 2
    assert f"--stop-at applies to one run, but {sweep} is a sweep" in capsys.readouterr().err
    assert main(["sweep", "gym-ppo"]) == 2
    assert "a new sweep needs a search space" in capsys.readouterr().err
    assert main(["eval", str(sweep)]) == 2
    assert "is a sweep of several trials" in capsys.readouterr().err
