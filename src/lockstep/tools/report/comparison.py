"""Compare experiments by the final scores of their runs: interquartile means and probabilities of improvement."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from lockstep.experiment.statistics import (
    PERCENT,
    TABLE_SAMPLES,
    Estimate,
    Improvement,
    estimate,
    probability_of_improvement,
)
from lockstep.run_name import environment_names
from lockstep.tools.report.charts import ChartGroup
from lockstep.tools.report.html import Table
from lockstep.tools.report.series import format_estimate, format_interval, format_score


class FinalScores(NamedTuple):
    """Final scores of the finished runs of an experiment, and what they are."""

    name: str
    values: Sequence[float]

    @property
    def estimate(self) -> Estimate | None:
        """Summary of the scores; None if there are none."""
        return estimate([self.values]) if self.values else None


class Method(NamedTuple):
    """What is compared: one experiment, or those of one recipe on several tasks."""

    label: str
    scores: dict[str, FinalScores]
    """Scores by task."""


class Comparison(NamedTuple):
    """Probability that the first method scores higher than the second."""

    first: str
    second: str
    tasks: Sequence[str]
    improvement: Improvement


def final_scores(group: ChartGroup) -> FinalScores:
    """Return the final scores of the finished runs of an experiment."""
    found = [run.final for run in group.runs if run.final is not None and run.state == "finished"]
    name = found[0].name if found else "score"
    return FinalScores(name, [score.value for score in found if score.name == name])


def compare(groups: Sequence[ChartGroup]) -> list[Comparison]:
    """Compare all pairs of methods on the tasks that both were trained on. Single runs are not compared."""
    comparisons = []
    for first, second in combinations(_methods(groups), 2):
        tasks = [task for task in first.scores if task in second.scores]
        pairs = [(first.scores[task], second.scores[task]) for task in tasks]
        if pairs and all(x.name == y.name and min(len(x.values), len(y.values)) > 1 for x, y in pairs):
            improvement = probability_of_improvement([x.values for x, _ in pairs], [y.values for _, y in pairs])
            comparisons.append(Comparison(first.label, second.label, tasks, improvement))
    return comparisons


def improvements_table(groups: Sequence[ChartGroup]) -> Table | None:
    """Table of the probabilities of improvement. None if there are none."""
    rows = [(x.first, x.second, ", ".join(x.tasks), _improvement(x)) for x in compare(groups)]
    return Table(("X", "Y", "tasks", f"P(X > Y) [{PERCENT} interval]"), rows, "figures") if rows else None


def summary(groups: Sequence[ChartGroup]) -> Iterator[str]:
    """Yield final scores and probabilities of improvement of experiments as lines of text."""
    for group in groups:
        scores = final_scores(group)
        if len(group.runs) > 1 and (found := scores.estimate) is not None:
            finished = f"{found.runs} of {len(group.runs)} runs"
            yield f"{group.label}: final {scores.name}, IQM [{PERCENT} interval] {format_estimate(found)}, {finished}"
    for comparison in compare(groups):
        yield f"P({comparison.first} > {comparison.second}) = {_improvement(comparison)}, {', '.join(comparison.tasks)}"


def statistics_note() -> str:
    """Return what the figures are."""
    return (
        f"IQM is the interquartile mean over runs, with a {PERCENT} stratified bootstrap interval "
        f"({TABLE_SAMPLES:,} samples, percentiles), as in rliable. SD is the standard deviation over runs."
    )


def _improvement(comparison: Comparison) -> str:
    probability, interval = comparison.improvement
    return f"{format_score(probability)} {format_interval(interval)}"


def _methods(groups: Sequence[ChartGroup]) -> list[Method]:
    """Return recipes if each of several tasks was trained at most once by each recipe; otherwise single experiments."""
    keys = [(group.runs[0].recipe, _task(group)) for group in groups]
    if len(set(keys)) < len(keys) or len({task for _, task in keys}) < 2:
        return [Method(group.label, {_task(group): final_scores(group)}) for group in groups]
    methods: dict[str, Method] = {}
    for (recipe, task), group in zip(keys, groups, strict=True):
        methods.setdefault(recipe, Method(recipe, {})).scores[task] = final_scores(group)
    return list(methods.values())


def _task(group: ChartGroup) -> str:
    """Return the environment of an experiment; its recipe if it has none."""
    run = group.runs[0]
    names = environment_names(run.settings.get("task.id"), run.settings.get("task.tasks"))
    return ", ".join(name[:60] for name in names[:5]) or run.recipe
