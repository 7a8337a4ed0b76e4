"""Reports about experiments: grouping, final scores with intervals, and probabilities of improvement."""

import numpy as np
import pytest

from helpers.experiments import write_experiment
from helpers.run_fixtures import write_run
from lockstep.cli import main
from lockstep.experiment.statistics import estimate, probability_of_improvement
from lockstep.tools.report.charts import name_groups
from lockstep.tools.report.comparison import compare, final_scores, summary
from lockstep.tools.report.page import write_page
from lockstep.tools.report.run_data import group, read_runs
from lockstep.tools.report.series import format_interval

A, B = [10.0, 20.0, 30.0, 40.0, 100.0], [15.0, 20.0, 25.0]


def groups_of(*paths):
    return name_groups(group(read_runs(paths)))


def test_report_of_experiment_has_iqm_and_interval_of_final_scores(tmp_path):
    path = write_experiment(tmp_path / "exp", range(5), A)
    page = write_page(read_runs([path]))
    (found,) = groups_of(path)
    expected = estimate([A])
    assert final_scores(found) == ("return", A)
    assert expected.iqm == 30.0
    assert f"95 %: {format_interval(expected.interval)}" in page
    assert "final return, IQM" in page
    assert "bands are their 95 % bootstrap intervals" in page


def test_report_of_experiment_counts_finished_runs_and_names_missing_ones(tmp_path):
    states = ["finished", "running", "finished"]
    path = write_experiment(tmp_path / "exp", range(5), [10.0, 99.0, 30.0], states=states)
    (found,) = groups_of(path)
    assert final_scores(found).values == [10.0, 30.0]
    assert "No metrics yet in exp: seeds 3, 4." in write_page(read_runs([path]))
    assert main(["report", str(write_experiment(tmp_path / "new")), "--out", str(tmp_path / "r.html")]) == 2


def test_report_of_two_experiments_has_probability_of_improvement(tmp_path, capsys):
    a, b = write_experiment(tmp_path / "a", range(5), A), write_experiment(tmp_path / "b", range(3), B)
    single = write_run(tmp_path / "single")
    groups = groups_of(a, b, single)
    assert [each.label for each in groups] == ["a", "b", "single"]  # equal settings, so that only the names differ
    assert [each.label for each in groups_of(a, write_experiment(tmp_path / "other" / "a", [0, 1], B))] == [
        str(a),
        str(tmp_path / "other" / "a"),
    ]
    (found,) = compare(groups)
    wins = np.mean([[(x > y) + 0.5 * (x == y) for y in B] for x in A])
    assert found.improvement == probability_of_improvement([A], [B])
    assert found.improvement.probability == pytest.approx(wins)
    assert (found.first, found.second, found.tasks) == ("a", "b", ["CartPole-v1"])
    assert main(["report", str(a), str(b), "--out", str(tmp_path / "r.html")]) == 0
    assert f"P(a > b) = {wins:g} [" in capsys.readouterr().out
    assert "P(X &gt; Y)" in (tmp_path / "r.html").read_text()


def test_recipes_on_several_tasks_are_compared_over_all_tasks(tmp_path):
    paths, scores = [], {("gym-ppo", "A-v0"): A, ("gym-ppo", "B-v0"): B, ("gym-sac", "A-v0"): B, ("gym-sac", "B-v0"): A}
    for (recipe, task), values in scores.items():
        paths.append(write_experiment(tmp_path / f"{recipe}-{task}", range(len(values)), values, task=task))
        for config in paths[-1].glob("*/config.yaml"):
            config.write_text(config.read_text().replace("gym-ppo", recipe))
    (found,) = compare(groups_of(*paths))
    assert (found.first, found.second, found.tasks) == ("gym-ppo", "gym-sac", ["A-v0", "B-v0"])
    assert found.improvement == probability_of_improvement([A, B], [B, A])
    assert found.improvement.probability == 0.5


def test_experiments_on_different_tasks_are_not_compared(tmp_path):
    a = write_experiment(tmp_path / "a", range(5), A, task="A-v0")
    b = write_experiment(tmp_path / "b", range(3), B, task="B-v0")
    assert compare(groups_of(a, b)) == []
    assert [line.partition(",")[0] for line in summary(groups_of(a, b))] == [
        "id A-v0: final return",
        "id B-v0: final return",
    ]
