"""Runs that a suite consists of: their commands, whether to start or to resume them, and their results."""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lockstep import __version__
from lockstep.apps.benchmark.results import BenchmarkResult
from lockstep.apps.benchmark.suites import Suite, SuiteTask
from lockstep.checkpoint.format import replace_text
from lockstep.config import ConfigError
from lockstep.experiment.run_scores import read_scores, training_return
from lockstep.experiment.scheduler import start_or_resume
from lockstep.io.safe_read import UnreadableFileError, read_json

VERSIONS = ("torch", "gymnasium")
"""Distributions whose versions are recorded for every suite."""
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class PlannedRun:
    """Run of one task with one seed."""

    suite: Suite
    task: SuiteTask
    seed: int
    procs: int
    steps: int
    directory: Path
    """Parent of the run directories of the suite."""

    @property
    def label(self) -> str:
        return f"{self.task.id} seed {self.seed}"

    @property
    def name(self) -> str:
        """Name of the run directory."""
        env = re.sub(r"[^\w.-]", "-", self.task.id)
        return f"{env}-steps{self.steps}-procs{self.procs}-seed{self.seed}"

    @property
    def path(self) -> Path:
        return self.directory / self.name

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.directory / f"{self.name}.log"

    @property
    def arguments(self) -> list[str]:
        """Arguments of lockstep that train this run, without its directory."""
        procs = ["--procs", str(self.procs)] if self.procs > 1 else []
        settings = [f"run.total_samples={self.steps}", "run.record_video=false", f"run.seed={self.seed}"]
        return ["train", self.task.recipe, f"task.id={self.task.id}", *self.task.settings, *settings, *procs]

    @property
    def command(self) -> str:
        """Command line that trains this run again."""
        return shlex.join(["lockstep", *self.arguments])

    @property
    def _record(self) -> Path:
        """File with the command and the commits of the run. It is written before the run directory exists."""
        return self.directory / f"{self.name}.json"

    def prepare(self, commit: str) -> list[str]:
        """Return the arguments of lockstep that start or resume the run. Record its command and commit before."""
        self.directory.mkdir(parents=True, exist_ok=True)
        before = self._commits()
        commits = [*before, *([] if commit in before else [commit])]
        replace_text(self._record, json.dumps({"command": self.command, "commits": commits}) + "\n")
        return start_or_resume(self, [*self.arguments, f"run.runs_dir={self.directory}", f"run.name={self.name}"])

    def _commits(self) -> list[str]:
        """Return the commits that trained the run so far. Raise ConfigError if the directory is that of another run."""
        try:
            record = read_json(self._record)
        except FileNotFoundError:
            record = None
        except UnreadableFileError as error:
            raise ConfigError(f"{error}.", "Remove it together with its run, or choose another --runs.") from None
        if record is None and not self.path.exists():
            return []
        known = isinstance(record, dict) and record.get("command") == self.command
        commits = record.get("commits") if isinstance(record, dict) else None
        if not known or not isinstance(commits, list):
            raise ConfigError(
                f"{self.path} was trained by another command, not by `{self.command}`.",
                "Remove it, or choose another directory with --runs.",
            )
        return [str(commit) for commit in commits]

    def result(self) -> BenchmarkResult:
        """Return the result of the finished run."""
        scores = read_scores(self.path)
        returns = [point.mean_return for point in scores.evaluations]
        return BenchmarkResult(
            task=self.task.id,
            recipe=self.task.recipe,
            seed=self.seed,
            procs=self.procs,
            steps=self.steps,
            command=self.command,
            commit=", ".join(self._commits()),
            versions=_versions(self.suite),
            seconds=round(scores.seconds, 1),
            training_return=training_return(scores.training),
            last_evaluation=returns[-1] if returns else None,
            best_evaluation=max(returns, default=None),
            training=[list(point) for point in scores.training],
            evaluations=[list(point) for point in scores.evaluations],
        )


def plan_runs(
    suite: Suite, tasks: Sequence[SuiteTask], seeds: int, procs: int, steps: int | None, directory: Path
) -> list[PlannedRun]:
    """Return the runs of a suite, the first seed of all tasks first: early results then cover the whole suite."""
    return [
        PlannedRun(suite, task, seed, procs, steps or task.steps, directory) for seed in range(seeds) for task in tasks
    ]


def source_commit() -> str:
    """Return the commit of this source tree, with `-dirty` if the package was changed; the version without Git."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:  # installed, perhaps inside another repository
        return f"v{__version__}"
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return f"v{__version__}"
    return commit + ("-dirty" if _git("status", "--porcelain", "--", ".") else "")


def _git(*arguments: str) -> str | None:
    """Return the output of a Git command in the package directory; None if it fails."""
    try:
        ended = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _versions(suite: Suite) -> dict[str, str]:
    versions = {}
    for name in (*VERSIONS, *suite.packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
