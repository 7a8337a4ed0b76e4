"""Cricket runs beside plain baselines on the same split, with the differences by a paired bootstrap over matches.

    python benchmarks/cricket.py RUN [RUN ...]        runs of cricket-gnn that predict the same thing

Baselines are fitted on the training and validation matches together, which the networks do not learn from: a
disadvantage that is ours. The bootstrap draws matches, because deliveries of one match are not independent.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.distributed import Runtime
from lockstep.evaluation import predict
from lockstep.inference import load
from lockstep.ops import prediction_metrics
from lockstep.tasks.cricket.cricsheet import FEATURES

DRAWS = 2000


def columns(task, rows, *names):
    table = np.asarray(task.archive.features[rows], dtype=np.float64)
    return table if not names else table[:, [FEATURES.index(name) for name in names]]


def linear(task, known, asked):
    """Ordinary least squares on every feature of the innings so far."""
    x, y = columns(task, known), targets(task, known)
    solution = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    return np.c_[columns(task, asked), np.ones(len(asked))] @ solution


def chase(task, rows):
    """Eleven terms of what is needed, and of late."""
    needed, left, wickets, rate = columns(task, rows, "needed", "left", "wickets", "needed_rate").T
    late = columns(task, rows, "runs_12", "wickets_12", "stand_runs").T
    more = [wickets * rate, rate**2, needed * wickets, left * wickets]
    return np.stack([needed, left, wickets, rate, *late, *more], axis=1)


def chase_and_target(task, rows):
    """Eleven others, with the target: whoever chases many runs is, on the whole, a better side."""
    needed, left, wickets, rate = columns(task, rows, "needed", "left", "wickets", "needed_rate").T
    (target,) = columns(task, rows, "target").T
    curved = [np.log1p(rate), wickets**2, np.log1p(needed) - np.log1p(left), np.sqrt(needed)]
    return np.stack([needed, left, wickets, rate, wickets * rate, (10 - wickets) * left, target, *curved], axis=1)


def logistic(task, known, asked, terms):
    """Eleven terms and a constant, by Newton's method."""
    terms = partial(terms, task)
    x, y = terms(known), targets(task, known)
    mean, deviation = x.mean(0), x.std(0)
    x = np.c_[(x - mean) / deviation, np.ones(len(x))]
    weight = np.zeros(x.shape[1])
    for _ in range(30):
        chance = prediction_metrics.sigmoid(x @ weight)
        slope = x.T @ (chance - y) + 1e-3 * weight
        curve = (x * (chance * (1 - chance))[:, None]).T @ x + 1e-3 * np.eye(len(weight))
        weight -= np.linalg.solve(curve, slope)
    return np.c_[(terms(asked) - mean) / deviation, np.ones(len(asked))] @ weight


def targets(task, rows):
    return task.outcomes(rows).astype(np.float64)


def losses(task, prediction, target):
    """What is averaged, delivery by delivery: absolute errors, or log-losses."""
    if task.target_type == "regression":
        return np.abs(prediction - target)
    return np.logaddexp(0.0, prediction) - target * prediction


def bootstrap(one, other, match):
    """The mean difference of two losses, and where 95 of 100 draws of matches put it."""
    _, place = np.unique(match, return_inverse=True)
    count, difference = np.bincount(place), np.bincount(place, one - other)
    drawn = np.random.default_rng(0).integers(len(count), size=(DRAWS, len(count)))
    found = difference[drawn].sum(1) / count[drawn].sum(1)
    return difference.sum() / count.sum(), *np.percentile(found, [2.5, 97.5])


def main():
    runs = [Path(word) for word in sys.argv[1:]]
    loaded = {run.name: load(run) for run in runs}
    config = loaded[runs[0].name].recipe.task
    task = config.build(None, None)
    known = np.concatenate([task.examples["train"], task.examples["validation"]])
    if config.train_stride > 1:  # the baselines see every delivery
        from dataclasses import replace

        known = np.concatenate([replace(config, train_stride=1).build(None, None).examples["train"], known])
        known = np.unique(known)
    asked = task.examples["test"]
    target = targets(task, asked)
    match = task.archive.innings[task.archive.innings_of[asked], 2]
    chances = {"logistic": partial(logistic, terms=chase), "log. + target": partial(logistic, terms=chase_and_target)}
    plain = {"linear": linear} if task.target_type == "regression" else chances
    found = {name: fit(task, known, asked) for name, fit in plain.items()}
    for name, policy in loaded.items():
        runtime = Runtime.single_process(policy.recipe.run)
        mine = policy.recipe.task.build(runtime.lanes, runtime.device)
        assert (mine.examples["test"] == asked).all(), f"{name} has another test split"
        found[name] = predict(policy.policy, mine, runtime, "test")
    print(f"test: {len(asked):,} deliveries of {len(np.unique(match)):,} matches")
    of = (
        prediction_metrics.regression_metrics if task.target_type == "regression" else prediction_metrics.binary_metrics
    )
    for name, prediction in found.items():
        print(f"  {name:16}", "  ".join(f"{key} {value:.4f}" for key, value in of(prediction, target).items()))
    what = "MAE" if task.target_type == "regression" else "log-loss"
    print(f"differences in {what} (below zero: the first is better), 95 % by match")
    beside = [*plain, *(name for name in loaded if "tabular" in name)]
    pairs = [(name, other) for name in loaded for other in beside if other != name]
    for name, other in pairs:
        mean, low, high = bootstrap(losses(task, found[name], target), losses(task, found[other], target), match)
        print(f"  {name:16} - {other:16} {mean:+.4f}  [{low:+.4f}, {high:+.4f}]")


if __name__ == "__main__":
    main()
