"""Interquartile means and stratified bootstrap intervals, compared with independent implementations of rliable's."""

import numpy as np
import pytest
from scipy.stats import trim_mean

from lockstep.experiment.statistics import (
    bootstrap_interval,
    estimate,
    interquartile_mean,
    probability_of_improvement,
)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 10, 25])
def test_interquartile_mean_equals_scipy_trim_mean(count):
    scores = np.random.default_rng(count).normal(size=(3, count)) ** 3
    assert interquartile_mean(scores) == pytest.approx(trim_mean(scores, 0.25, axis=1))


def reference_interval(matrix, samples, seed):
    """rliable's definition, one sample at a time: `matrix` has a row per run and a column per task."""
    generator = np.random.RandomState(seed)
    runs, tasks = matrix.shape
    values = []
    for _ in range(samples):
        drawn = np.stack([matrix[generator.choice(runs, runs), task] for task in range(tasks)], axis=1)
        values.append(trim_mean(drawn, 0.25, axis=None))
    return np.percentile(values, [2.5, 97.5])


@pytest.mark.parametrize(("runs", "tasks"), [(5, 1), (10, 4)])
def test_bootstrap_interval_agrees_with_reference_implementation(runs, tasks):
    matrix = np.random.default_rng(0).normal(loc=np.arange(tasks), scale=1 + np.arange(tasks), size=(runs, tasks))
    interval = np.array(bootstrap_interval(list(matrix.T), samples=20_000))
    expected = reference_interval(matrix, samples=2_500, seed=1)
    assert np.abs(interval - expected).max() < 0.08 * (expected[1] - expected[0])


def test_bootstrap_resamples_each_task_among_its_own_runs():
    # Runs of a task are equal, so resampling within tasks changes nothing. Resampling over tasks would.
    assert bootstrap_interval([np.zeros(5), np.full(3, 10.0)], samples=200) == (2.5, 2.5)


def test_bootstrap_interval_is_a_function_of_its_seed():
    scores = [np.arange(5.0)]
    assert bootstrap_interval(scores, samples=500) == bootstrap_interval(scores, samples=500)
    assert bootstrap_interval(scores, samples=500) != bootstrap_interval(scores, samples=500, seed=1)


def test_estimate_of_one_run_has_no_interval():
    single = estimate([[3.0]])
    assert (single.iqm, single.interval, single.standard_deviation, single.runs) == (3.0, None, None, 1)
    several = estimate([[1.0, 2.0, 3.0, 4.0, 90.0]])
    assert (several.iqm, several.mean, several.runs) == (3.0, 20.0, 5)
    assert several.standard_deviation == pytest.approx(np.std([1, 2, 3, 4, 90], ddof=1))
    assert several.interval is not None
    assert several.interval[0] < 3.0 < several.interval[1]


def reference_improvement(xs, ys):
    """The definition of the rliable paper (section 4.3), pair by pair: mean over tasks of P(X > Y) + P(X = Y) / 2."""
    of_tasks = []
    for x_runs, y_runs in zip(xs, ys, strict=True):
        wins = 0.0
        for x in x_runs:
            for y in y_runs:
                wins += 1.0 if x > y else 0.5 if x == y else 0.0
        of_tasks.append(wins / (len(x_runs) * len(y_runs)))
    return np.mean(of_tasks)


def reference_improvement_interval(xs, ys, samples, seed):
    """The stratified bootstrap, one sample at a time: runs of each task and of X and Y are drawn independently."""
    generator = np.random.RandomState(seed)
    values = [
        reference_improvement(*([generator.choice(runs, len(runs)) for runs in method] for method in (xs, ys)))
        for _ in range(samples)
    ]
    return np.percentile(values, [2.5, 97.5])


@pytest.mark.parametrize(("tasks", "x_runs", "y_runs"), [(1, 5, 5), (3, 6, 4)])
def test_probability_of_improvement_agrees_with_reference(tasks, x_runs, y_runs):
    generator = np.random.default_rng(tasks)
    # Whole numbers, so that some scores are equal.
    xs = [generator.normal(4 + task, 3, x_runs).round() for task in range(tasks)]
    ys = [generator.normal(3, 3, y_runs).round() for _ in range(tasks)]
    assert any(x == y for task in range(tasks) for x in xs[task] for y in ys[task])
    found = probability_of_improvement(xs, ys, samples=20_000)
    assert found.probability == pytest.approx(reference_improvement(xs, ys))
    expected = reference_improvement_interval(xs, ys, samples=2_000, seed=1)
    assert np.abs(np.array(found.interval) - expected).max() < 0.08 * (expected[1] - expected[0])


def test_probability_of_improvement_of_known_scores_is_exact():
    assert probability_of_improvement([[2.0, 3.0]], [[1.0, 0.0]]) == (1.0, (1.0, 1.0))
    assert probability_of_improvement([[1.0, 1.0]], [[1.0]]) == (0.5, (0.5, 0.5))
    # One task is always won and one always lost: drawing tasks would change the mean, drawing runs does not.
    assert probability_of_improvement([[9.0, 8.0], [0.0]], [[1.0], [1.0, 2.0]]) == (0.5, (0.5, 0.5))
