"""`lockstep benchmark`: suites, results as data, tables, curves, and the runner with a substitute for training."""

import json
import os
import signal
import threading
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from helpers.fake_training import FakeTraining
from lockstep.apps.benchmark.planned_runs import plan_runs
from lockstep.apps.benchmark.results import BenchmarkResult, append_result, group_by_seed, read_results
from lockstep.apps.benchmark.runner import SuiteRunner
from lockstep.apps.benchmark.suites import SOURCES, SUITES
from lockstep.apps.benchmark.table import markdown, score_rows
from lockstep.cli import main
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.config import ConfigError
from lockstep.experiment import scheduler
from lockstep.experiment.progress import RunsProgress
from lockstep.experiment.run_scores import TrainingPoint, read_scores, training_return
from lockstep.io.jsonl import append_jsonl

CLASSIC = SUITES["classic"]

# -------------------------------------------------------------------------------------------------------------- suites


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_commands_of_suite_are_valid_and_use_the_preset_of_the_environment(suite, tmp_path, capsys):
    for run in plan_runs(suite, suite.tasks, 1, 1, None, tmp_path):
        start, rest, _ = parse_train(run.arguments[1:])
        recipe = resolve(parse_recipe(start, rest, "lockstep train"), 1)
        assert (recipe.task.id, recipe.run.total_samples) == (run.task.id, run.task.steps)
        assert (f"{run.task.id}: preset" in capsys.readouterr().err) == (run.task.id != "CartPole-v1")
        assert run.task.published
        assert {published.source for published in run.task.published} <= SOURCES.keys()
        random = run.task.random_return
        assert random is None or random < run.task.published[0].score


def test_unknown_suite_task_and_numbers_are_rejected(capsys, tmp_path):
    out = ["--out", str(tmp_path), "--runs", str(tmp_path)]
    for words, told in (
        (["atary"], "there is no suite 'atary'"),
        (["classic", "--tasks", "CartPole-v0"], "has no task 'CartPole-v0'"),
        (["classic", "--seeds", "0"], "--seeds is 0"),
        (["classic", "--parallel", "0"], "--parallel 0"),
        (["classic", "--plot"], "Train the suite first: lockstep benchmark classic"),
    ):
        assert main(["benchmark", *words, *out]) == 2
        assert told in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- scores


def test_scores_of_a_run_are_read_from_its_log(tmp_path):
    for line in (
        {"samples": 1000, "rollout/ep_return_mean": 10.0, "rollout/ep_length_mean": 10.0, "time/seconds": 2.0},
        {"samples": 1000, "eval/return_mean": 15.0},
        {"samples": 2000, "time/seconds": 3.0},
        {"samples": 3000, "rollout/ep_return_mean": 50.0, "rollout/ep_length_mean": 20.0, "time/seconds": 1.0},
        {"samples": 3000, "eval/return_mean": 60.0},
    ):
        append_jsonl(tmp_path / "metrics.jsonl", line)
    scores = read_scores(tmp_path)
    assert scores.training == [(1000, 10.0, 100.0), (3000, 50.0, 50.0)]
    assert scores.evaluations == [(1000, 15.0), (3000, 60.0)]
    assert scores.seconds == 6.0


def test_training_return_pools_whole_entries_by_number_of_episodes():
    points = [TrainingPoint(1, 1000.0, 500), TrainingPoint(2, 10.0, 90), TrainingPoint(3, 50.0, 30)]
    assert training_return(points) == (10 * 90 + 50 * 30) / 120
    assert training_return(points[-1:]) == 50.0
    assert training_return([]) is None


# --------------------------------------------------------------------------------------------------- results and tables


def result(task="CartPole-v1", seed=0, *, steps=100_000, procs=1, score=450.0, evaluations=((1, 100.0), (2, 200.0))):
    more = f" --procs {procs}" if procs > 1 else ""
    return BenchmarkResult(
        task=task,
        recipe="gym-ppo",
        seed=seed,
        procs=procs,
        steps=steps,
        command=f"lockstep train gym-ppo task.id={task} run.total_samples={steps} run.seed={seed}{more}",
        commit="0123456789abcdef",
        versions={"torch": "2.13.0"},
        seconds=60.0,
        training_return=score,
        last_evaluation=evaluations[-1][1],
        best_evaluation=max(score for _, score in evaluations),
        training=[[steps // 2, score / 2, 10], [steps, score, 10]],
        evaluations=[list(point) for point in evaluations],
    )


def test_results_are_grouped_by_everything_but_the_seed(tmp_path):
    path = tmp_path / "classic.jsonl"
    for line in (
        result(seed=1),
        result("Acrobot-v1", steps=1_000_000),
        result(seed=0, score=1.0),
        result(seed=0),  # trained again: the last line counts
        result(seed=0, procs=2),
        result(seed=0, steps=500),
    ):
        append_result(path, line)
    groups = group_by_seed(CLASSIC, read_results(path))
    assert [(group.label, [x.seed for x in group.results]) for group in groups] == [
        ("CartPole-v1", [0, 1]),
        ("CartPole-v1, 500 steps", [0]),
        ("CartPole-v1, 2 processes", [0]),
        ("Acrobot-v1", [0]),
    ]
    assert groups[0].scores("training") == [450.0, 450.0]
    assert groups[0].command.endswith("run.seed=S")


def test_best_evaluation_is_that_of_the_highest_mean_over_seeds():
    curves = [((1, 10.0), (2, 90.0), (3, 50.0)), ((1, 10.0), (2, 0.0), (3, 50.0), (4, 500.0))]
    (group,) = group_by_seed(CLASSIC, [result(seed=n, evaluations=curve) for n, curve in enumerate(curves)])
    assert group.scores("best") == [50.0, 50.0]
    assert group.scores("last") == [50.0, 500.0]


def test_table_has_published_scores_in_the_row_of_their_protocol():
    groups = group_by_seed(CLASSIC, [result(seed=seed, score=400.0 + seed) for seed in range(5)])
    rows = score_rows(CLASSIC, groups)
    cells = {row.protocol: row.cells for row in rows}
    assert cells["last 100 training episodes"][2].startswith("402 [40")
    assert cells["last 100 training episodes"][3:5] == ("402 ± 1.581", "5")
    assert cells["last 100 training episodes"][5] == "CleanRL 490 ± 6.12 (500k steps, 3 runs)"
    assert cells["last evaluation"][5] == "RL Zoo 500 ± 0 (100k steps, 1 run)"
    assert cells["best evaluation"][5] == "-"
    page = markdown(CLASSIC, groups, rows)
    assert "run.seed=S`, S = 0, 1, 2, 3, 4; commit 0123456789; torch 2.13.0; 60 s a run" in page
    assert "- CleanRL: CleanRL fe8d8a0" in page


def test_normalized_score_is_0_for_random_actions_and_1_for_the_published_score():
    tasks = tuple(replace(task, random_return=-1000.0) for task in CLASSIC.tasks)
    suite = replace(CLASSIC, tasks=tasks)
    results = []
    for number, task in enumerate(tasks):
        score = task.published[0].score if number else -1000.0  # the first task has learned nothing
        for seed in range(4):
            results.append(result(task.id, seed, steps=task.steps, evaluations=[(1, score)]))
    row = score_rows(suite, group_by_seed(suite, results))[-1]
    assert (row.task, row.protocol) == ("all tasks", "normalized score")
    assert (row.estimate.mean, row.estimate.iqm, row.estimate.runs) == (pytest.approx(0.8), pytest.approx(1.0), 20)
    for missing in (results[:-4], [replace(line, steps=line.steps - 1) for line in results]):
        assert all(row.task != "all tasks" for row in score_rows(suite, group_by_seed(suite, missing)))


def test_plot_writes_table_and_curves_from_the_data_alone(tmp_path, capsys):
    for seed in range(3):
        append_result(tmp_path / "classic.jsonl", result(seed=seed, score=400.0 + seed))
        append_result(tmp_path / "classic.jsonl", result("Acrobot-v1", seed, steps=1_000_000, score=-90.0))
    assert main(["benchmark", "classic", "--plot", "--out", str(tmp_path)]) == 0
    assert "Table and curves" in capsys.readouterr().out
    first = [(tmp_path / f"classic.{kind}").read_text() for kind in ("md", "svg")]
    texts = [text.text for text in ElementTree.fromstring(first[1]).iter("{http://www.w3.org/2000/svg}text")]
    assert "CartPole-v1: gym-ppo, 3 runs" in texts
    assert "CleanRL: -86.36 (last 100 training episodes, 500k steps)" in texts
    assert main(["benchmark", "classic", "--plot", "--out", str(tmp_path)]) == 0
    assert [(tmp_path / f"classic.{kind}").read_text() for kind in ("md", "svg")] == first


@pytest.mark.parametrize("change", [{"training": 3}, {"evaluations": [[1]]}, {"command": 5}, {"seed": None}, None])
def test_invalid_line_of_the_data_file_is_named(tmp_path, capsys, change):
    append_result(tmp_path / "classic.jsonl", result())
    line = json.loads((tmp_path / "classic.jsonl").read_text())
    append_jsonl(tmp_path / "classic.jsonl", {"samples": 1} if change is None else line | change)
    assert main(["benchmark", "classic", "--plot", "--out", str(tmp_path)]) == 2
    assert "classic.jsonl, line 2 is not a result of a benchmark" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- runner


@pytest.fixture
def suite_runner(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.01)

    def build(*modes, seeds=2, steps=500, parallel=2):
        planned = plan_runs(CLASSIC, CLASSIC.tasks[:2], seeds, 1, steps, tmp_path / "runs")
        training = FakeTraining(tmp_path, modes)
        return SuiteRunner(planned, tmp_path / "classic.jsonl", parallel, RunsProgress(), training), training

    return build


def test_runner_trains_all_runs_some_at_a_time_and_skips_recorded_ones(suite_runner, tmp_path):
    runner, training = suite_runner()
    runner.run()
    assert training.most == 2
    results = read_results(tmp_path / "classic.jsonl")
    assert {(x.task, x.seed, x.training_return, x.last_evaluation) for x in results} == {
        (task, seed, seed, 10 * seed) for task in ("CartPole-v1", "Acrobot-v1") for seed in (0, 1)
    }
    runner, training = suite_runner(seeds=3)
    runner.run()
    assert [words[-1] for words in training.started] == [
        "run.name=CartPole-v1-steps500-procs1-seed2",
        "run.name=Acrobot-v1-steps500-procs1-seed2",
    ]
    assert not runner.failed
    assert not runner.stopped


def test_runner_continues_after_a_failed_run_and_trains_it_again(suite_runner, tmp_path, capsys):
    runner, _ = suite_runner("fail")
    runner.run()
    assert [run.label for run in runner.failed] == ["CartPole-v1 seed 0"]
    assert "    no such environment" in capsys.readouterr().err
    assert len(read_results(tmp_path / "classic.jsonl")) == 3
    runner, training = suite_runner()
    runner.run()
    assert len(training.started) == 1
    assert len(read_results(tmp_path / "classic.jsonl")) == 4


def test_stop_signal_is_passed_on_and_the_runs_are_resumed(suite_runner, tmp_path):
    runner, training = suite_runner("wait", "wait")
    waiting = [run.path / "waiting" for run in runner.planned[:2]]

    def interrupt():
        while not all(path.exists() for path in waiting):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    runner.run()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert runner.stopped
    assert not runner.failed
    assert len(training.started) == 2
    assert read_results(tmp_path / "classic.jsonl") == []
    runner, training = suite_runner()
    runner.run()
    assert [words[0] for words in training.started] == ["resume", "resume", "train", "train"]
    assert len(read_results(tmp_path / "classic.jsonl")) == 4


def test_killed_runs_are_recorded_resumed_or_started_again(suite_runner, tmp_path):
    """A kill of the command and its runs leaves a finished run, one with a checkpoint and one without."""
    runner, training = suite_runner()
    finished, saved, unsaved, _ = runner.planned
    for run in (finished, saved, unsaved):
        arguments = run.prepare("commit-1")
        training(arguments, run.log).wait()
    (saved.path / "checkpoints" / "000000000001-g0001").mkdir()
    for run in (saved, unsaved):
        (run.path / "status.json").write_text('{"state": "running"}')
        (run.path / "metrics.jsonl").unlink()
    (unsaved.path / "old").touch()
    training.started.clear()
    runner.run()
    assert [words[:2] for words in training.started] == [
        ["resume", str(saved.path)],
        ["train", "gym-ppo"],
        ["train", "gym-ppo"],
    ]
    assert not (unsaved.path / "old").exists()
    results = {result.command: result for result in read_results(tmp_path / "classic.jsonl")}
    assert len(results) == 4
    assert results[finished.command].commit == "commit-1"
    assert results[saved.command].commit.startswith("commit-1, ")


def test_run_directory_of_another_command_is_not_touched(suite_runner):
    runner, _ = suite_runner()
    run = runner.planned[0]
    run.path.mkdir(parents=True)
    (run.path / "file").touch()
    with pytest.raises(ConfigError, match="was trained by another command"):
        runner.run()
    (run.directory / f"{run.name}.json").write_text(json.dumps({"command": "lockstep train", "commits": []}))
    with pytest.raises(ConfigError, match="was trained by another command"):
        runner.run()
    assert (run.path / "file").exists()
