"""Results of a suite as data: one JSON line per finished run, from which tables and plots are made."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from lockstep.apps.benchmark.suites import Protocol, Suite, SuiteTask
from lockstep.config import ConfigError
from lockstep.io.jsonl import append_jsonl, read_jsonl

_SEED = re.compile(r"\brun\.seed=\d+")


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """Line of the data file: scores, curves and origin of one run."""

    task: str
    recipe: str
    seed: int
    procs: int
    steps: int
    command: str
    """Command that trains this run again."""
    commit: str
    """Commits of Lockstep that trained the run."""
    versions: dict[str, str]
    seconds: float
    """Wall time of training and evaluation. Other runs shared the machine."""
    training_return: float | None
    last_evaluation: float | None
    best_evaluation: float | None
    training: list[list[float]]
    """Points [samples, mean return, number of episodes] of training episodes."""
    evaluations: list[list[float]]
    """Points [samples, mean return] of evaluations."""


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed."""

    task: SuiteTask
    results: Sequence[BenchmarkResult]
    """In order of the seeds."""

    @property
    def procs(self) -> int:
        return self.results[0].procs

    @property
    def steps(self) -> int:
        return self.results[0].steps

    @property
    def command(self) -> str:
        """Command of all runs, with S for the seed."""
        return _without_seed(self.results[0].command)

    @property
    def label(self) -> str:
        """Task, with what differs from the suite."""
        procs = f", {self.procs} processes" if self.procs > 1 else ""
        steps = f", {self.steps:,} steps" if self.steps != self.task.steps else ""
        return f"{self.task.id}{procs}{steps}"

    def scores(self, protocol: Protocol) -> list[float]:
        """Return the score of each run under a protocol. Runs without one are skipped."""
        if protocol == "best":
            return self._best_scores()
        name = "training_return" if protocol == "training" else "last_evaluation"
        return [score for result in self.results if (score := getattr(result, name)) is not None]

    def _best_scores(self) -> list[float]:
        """Return the scores at the evaluation with the highest mean over the seeds."""
        curves = [{int(samples): score for samples, score in result.evaluations} for result in self.results]
        shared = sorted(set.intersection(*map(set, curves)))
        if not shared:
            return []
        best = max(shared, key=lambda samples: fmean(curve[samples] for curve in curves))
        return [curve[best] for curve in curves]


def append_result(path: Path, result: BenchmarkResult) -> None:
    """Append the line of a finished run."""
    append_jsonl(path, asdict(result))


def read_results(path: Path) -> list[BenchmarkResult]:
    """Read the data file of a suite; an empty list if there is none. Of two lines of one command, the last counts."""
    results: dict[str, BenchmarkResult] = {}
    for number, line in enumerate(read_jsonl(path), 1):
        result = _parse(line, f"{path}, line {number}")
        results[result.command] = result
    return list(results.values())


def group_by_seed(suite: Suite, results: Sequence[BenchmarkResult]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, in the order of the suite's tasks."""
    groups = []
    for task in suite.tasks:
        variants: dict[tuple[int, int, str], list[BenchmarkResult]] = {}
        for result in results:
            if result.task == task.id:
                variants.setdefault((result.procs, -result.steps, _without_seed(result.command)), []).append(result)
        for _, members in sorted(variants.items()):
            groups.append(SeedGroup(task, sorted(members, key=lambda result: result.seed)))
    return groups


def normalized_scores(suite: Suite, groups: Sequence[SeedGroup], procs: int) -> list[list[float]] | None:
    """Return the scores of each task with 0 for random actions and 1 for the first published score.

    None if a task has no runs on that number of processes with its whole budget, or no such scores.
    """
    tasks = []
    for task in suite.tasks:
        group = next((x for x in groups if x.task == task and x.procs == procs and x.steps == task.steps), None)
        if group is None or task.random_return is None or not task.published:
            return None
        reference = task.published[0]
        span = reference.score - task.random_return
        tasks.append([(score - task.random_return) / span for score in group.scores(reference.protocol)])
    return tasks if all(tasks) else None


def _without_seed(command: str) -> str:
    return _SEED.sub("run.seed=S", command)


def _parse(line: dict[str, Any], place: str) -> BenchmarkResult:
    names = [field.name for field in fields(BenchmarkResult)]
    missing = [name for name in names if name not in line]
    if missing:
        raise ConfigError(f"{place} is not a result of a benchmark: it has no {missing[0]}.", "Restore the file.")
    result = BenchmarkResult(**{name: line[name] for name in names})
    try:
        valid = all(len(point) == 3 for point in result.training) and all(len(x) == 2 for x in result.evaluations)
        sum(value for point in [*result.training, *result.evaluations] for value in point)
        text = result.task + result.command + result.commit
        valid = valid and isinstance(text, str) and min(result.seed, result.procs - 1, result.steps - 1) >= 0
    except TypeError:
        valid = False
    if not valid:
        raise ConfigError(f"{place} is not a result of a benchmark: a value has the wrong type.", "Restore the file.")
    return result
