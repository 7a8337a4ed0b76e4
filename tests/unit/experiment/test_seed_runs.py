"""Training of an experiment, with a substitute for training: what is started, resumed, skipped, and where."""

import json
import os
import signal
import threading

import pytest

from helpers.fake_training import FakeTraining
from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.experiment import scheduler, seed_runs
from lockstep.experiment.experiment import Experiment
from lockstep.experiment.lock import locked
from lockstep.experiment.record import read_experiment
from lockstep.experiment.seed_runs import (
    create_experiment,
    gpus_of_slot,
    seed_recipe,
    train_experiment,
)
from lockstep.registry import find_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.01)
    run = {"runs_dir": str(tmp_path / "runs"), "name": "exp", "seed": 5, "total_samples": 500, "device": "cpu"}
    return apply_overrides(find_recipe("gym-ppo")(), {"run": run})


def test_create_experiment_records_recipe_seeds_and_command(recipe, tmp_path):
    path = create_experiment(recipe, 3, 2, "lockstep train\x1b gym-ppo", "/runs/other@100")
    record = read_experiment(path)
    assert path == tmp_path / "runs" / "exp"
    assert (record.recipe, record.seeds, record.procs, record.init_from) == ("gym-ppo", (5, 6, 7), 2, "/runs/other@100")
    assert record.command == "lockstep train\\u001b gym-ppo"
    built = seed_recipe(path, record, 7)
    assert (built.run.seed, built.run.name, built.run.runs_dir) == (7, "seed-7", str(path))
    assert (built.task, built.algo) == (recipe.task, recipe.algo)
    assert [seed_recipe(path, record, seed).run.record_video for seed in (5, 6, 7)] == [True, False, False]


def test_create_experiment_never_replaces_a_run_or_experiment(recipe, tmp_path):
    path = create_experiment(recipe, 2, 1, "command")
    before = (path / "experiment.json").read_text()
    with pytest.raises(ConfigError, match=f"already contains an experiment.\nResume it: lockstep resume {path}"):
        create_experiment(recipe, 3, 1, "command")
    assert (path / "experiment.json").read_text() == before
    for seeds in (0, 1001):
        with pytest.raises(ConfigError, match=f"the number of seeds is {seeds}"):
            create_experiment(recipe, seeds, 1, "command")


def test_train_experiment_trains_all_seeds_some_at_a_time_and_skips_finished(recipe, tmp_path):
    path, training = create_experiment(recipe, 4, 1, "command"), FakeTraining(tmp_path, [])
    outcome = train_experiment(path, parallel=2, start=training)
    assert training.started == [["train", "--seed-run", str(path), str(seed), "--procs", "1"] for seed in (5, 6, 7, 8)]
    assert training.most == 2
    assert (outcome.failed, outcome.stopped) == ([], False)
    experiment = Experiment(path)
    assert (experiment.status, experiment.scores) == ("finished", [50.0, 60.0, 70.0, 80.0])
    assert experiment.estimate.iqm == 65.0
    again = FakeTraining(tmp_path, [])
    train_experiment(path, start=again)
    assert again.started == []


def test_run_that_does_not_fit_evenly_trains_in_two_parts(recipe, tmp_path, capsys):
    path, training = create_experiment(recipe, 5, 1, "command"), FakeTraining(tmp_path, [])
    train_experiment(path, parallel=2, start=training)
    new = [["train", "--seed-run", str(path), str(seed), "--procs", "1"] for seed in (5, 6, 7, 8, 9)]
    last = ["resume", str(path / "seed-5"), "--procs", "1"]
    assert training.started == [[*new[0], "--stop-at", "250"], *new[1:], last]
    assert training.most == 2
    assert Experiment(path).scores == [50.0, 60.0, 70.0, 80.0, 90.0]
    printed = capsys.readouterr().err
    assert "seed 5: first part done, paused at 250 steps" in printed
    assert printed.count("seed 5: finished") == 1


def test_first_part_that_was_trained_before_is_not_repeated(recipe, tmp_path):
    path, training = create_experiment(recipe, 3, 1, "command"), FakeTraining(tmp_path, ["finish", "fail"])
    assert [run.seed for run in train_experiment(path, parallel=2, start=training).failed] == [6]
    (path / "seed-5" / "status.json").unlink()  # as if the second part had been killed
    again = FakeTraining(tmp_path, [])
    train_experiment(path, procs=1, parallel=1, start=again)
    assert [arguments[:2] for arguments in again.started] == [
        ["resume", str(path / "seed-5")],
        ["train", "--seed-run"],
    ]
    assert len(Experiment(path).scores) == 3


def test_second_part_of_a_run_whose_first_part_failed_is_not_tried(recipe, tmp_path):
    path, training = create_experiment(recipe, 3, 1, "command"), FakeTraining(tmp_path, ["fail"])
    assert [run.seed for run in train_experiment(path, parallel=2, start=training).failed] == [5]
    assert len(training.started) == 3


def test_failed_run_is_reported_and_trained_again(recipe, tmp_path, capsys):
    path = create_experiment(recipe, 2, 1, "command")
    outcome = train_experiment(path, parallel=1, start=FakeTraining(tmp_path, ["fail"]))
    assert [run.seed for run in outcome.failed] == [5]
    assert "    no such environment" in capsys.readouterr().err
    assert Experiment(path).scores == [60.0]
    again = FakeTraining(tmp_path, [])
    assert train_experiment(path, start=again).failed == []
    assert [arguments[3] for arguments in again.started] == ["5"]


def test_stopped_experiment_resumes_interrupted_and_starts_missing_runs(recipe, tmp_path):
    path, training = create_experiment(recipe, 3, 1, "command"), FakeTraining(tmp_path, ["finish", "wait"])

    def interrupt():
        while not (path / "seed-6" / "waiting").exists():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = train_experiment(path, parallel=1, start=training)
    thread.join()
    assert (outcome.failed, outcome.stopped) == ([], True)
    assert Experiment(path).status == "preempted"
    again = FakeTraining(tmp_path, [])
    assert not train_experiment(path, procs=2, start=again).stopped
    assert again.started == [
        ["resume", str(path / "seed-6"), "--procs", "2"],
        ["train", "--seed-run", str(path), "7", "--procs", "2"],
    ]


def test_run_without_config_keeps_its_checkpoints(recipe, tmp_path):
    path, training = create_experiment(recipe, 1, 1, "command"), FakeTraining(tmp_path, [])
    checkpoint = path / "seed-5" / "checkpoints" / "000000000001-g0001"
    checkpoint.mkdir(parents=True)  # config.yaml was deleted
    train_experiment(path, start=training)
    assert checkpoint.exists()
    assert training.started == [["resume", str(path / "seed-5"), "--procs", "1"]]


def test_moved_experiment_is_trained_in_its_new_place(recipe, tmp_path):
    path = create_experiment(recipe, 1, 1, "command").rename(tmp_path / "moved")
    train_experiment(path, start=FakeTraining(tmp_path, []))
    assert Experiment(path).scores == [50.0]
    assert not (tmp_path / "runs" / "exp").exists()


def test_experiment_is_trained_by_one_process_at_a_time(recipe, tmp_path):
    path = create_experiment(recipe, 1, 1, "command")
    with locked(path, "experiment"), pytest.raises(ConfigError, match="another process trains the experiment"):
        train_experiment(path, start=FakeTraining(tmp_path, []))


def test_code_in_the_directory_of_an_experiment_is_not_run(recipe, tmp_path):
    path, ran = create_experiment(recipe, 1, 1, "command"), tmp_path / "ran"
    evil = path / "evil.py"
    evil.write_text(f"open({str(ran)!r}, 'w')")
    values = json.loads((path / "experiment.json").read_text())
    (path / "experiment.json").write_text(json.dumps(values | {"recipe": str(evil)}))
    with pytest.raises(ConfigError, match="is a file inside it"):
        train_experiment(path, start=FakeTraining(tmp_path, []))
    assert not ran.exists()


def test_runs_are_distributed_over_gpus_and_cores(recipe, tmp_path, monkeypatch):
    assert [gpus_of_slot(["4", "5", "6", "7"], slot, 2) for slot in range(3)] == [["4", "5"], ["6", "7"], ["4", "5"]]
    assert gpus_of_slot(["0"], 1, 2) == ["0"]
    assert gpus_of_slot([], 1, 2) == []
    monkeypatch.setattr(seed_runs, "available_cores", lambda: 7)
    path, training = create_experiment(recipe, 8, 2, "command"), FakeTraining(tmp_path, [])
    train_experiment(path, start=training)
    assert training.most == 3
    monkeypatch.setattr(seed_runs, "device_type", lambda requested: "cuda")
    monkeypatch.setattr(seed_runs, "visible_gpus", lambda: ["4", "5", "6"])
    path = create_experiment(apply_overrides(recipe, {"run.name": "gpu"}), 4, 1, "command")
    training = FakeTraining(tmp_path, [])
    train_experiment(path, start=training)
    assert training.most == 3
    assert [arguments[-2:] for arguments in training.started[:3]] == [["--gpus", "4"], ["--gpus", "5"], ["--gpus", "6"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "gym-ppo", "--parallel", "2"], "--parallel needs several runs"),
        (["train", "gym-ppo", "--seeds", "0", "run.runs_dir=x"], "the number of seeds is 0"),
        (["train", "gym-ppo", "--seeds", "2", "--autoscale"], "--autoscale probes the machine for one run"),
        (["train", "gym-ppo", "--seeds", "2", "--nnodes", "2"], "trains on one machine"),
        (["resume", "runs/exp", "--total-samples", "9"], "--total-samples applies to one run"),
        (["resume", "runs/exp", "run.device=cpu"], "run.device applies to one run"),
        (["resume", "runs/exp", "--parallel", "0"], "--parallel is 0"),
        (["eval", "runs/exp"], "is an experiment of several seeds.\nName one of its runs: lockstep ls runs/exp"),
        (["train", "gym-ppo", "run.name=exp"], "already contains an experiment"),
    ],
)
def test_commands_refuse_what_experiments_do_not_have(recipe, tmp_path, monkeypatch, capsys, arguments, message):
    create_experiment(recipe, 2, 1, "command")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
