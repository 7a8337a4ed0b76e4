"""Runs of an experiment as the queue of a scheduler, some of them in two parts so that no place stays empty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path

from lockstep.experiment.record import SEED_RUN
from lockstep.experiment.run_scores import final_score
from lockstep.experiment.scheduler import RemainingTime, describe_runs, has_reached, is_finished, start_or_resume


@dataclass(frozen=True)
class SeedRun:
    """Run of one seed of an experiment, or a part of it."""

    seed: int
    path: Path
    """Run directory."""
    steps: int
    """Global samples to train for."""
    procs: int
    stop_at: int | None = None
    """Global samples after which the first part of the run ends. None: train to the end."""

    @property
    def label(self) -> str:
        return f"seed {self.seed}"

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.path.with_name(f"{self.path.name}.log")

    def prepare(self, gpus: Sequence[str]) -> list[str]:
        """Return the arguments of lockstep that start or resume the run on some GPUs. Empty: all visible ones."""
        start = ["train", SEED_RUN, str(self.path.parent), str(self.seed), "--procs", str(self.procs)]
        return start_or_resume(self, start, self.stop_at, gpus)


class SeedQueue:
    """Runs of an experiment in the order in which they start. The second part of a run waits for the first."""

    def __init__(self, runs: Sequence[SeedRun], places: int) -> None:
        """Read which runs have finished, and divide the others.

        Args:
            runs: All runs of the experiment.
            places: Runs that train at a time.
        """
        unfinished = [run for run in runs if not is_finished(run.path)]
        self._waiting = divide_runs(unfinished, places)
        self._active: set[int] = set()
        self._total, self._done = len(runs), len(runs) - len(unfinished)
        self._remaining = RemainingTime(unfinished)

    def take(self) -> SeedRun | None:
        for run in self._waiting:
            if run.seed not in self._active:
                self._waiting.remove(run)
                self._active.add(run.seed)
                return run
        return None

    def is_done(self, run: SeedRun) -> bool:
        return has_reached(run.path, run.stop_at)

    def record(self, run: SeedRun) -> str:
        """Count a run that has finished. Return its score as text, or that its second part follows."""
        self._active.discard(run.seed)
        if run.stop_at is not None:
            return f"first part done, paused at {run.stop_at:,} steps"
        self._done += 1
        score = final_score(run.path)
        return f"finished at {run.steps:,} steps" if score is None else f"finished, {score.name} {score.value:,.4g}"

    def handle_failure(self, run: SeedRun, code: int) -> str | None:
        """Remove the second part of a run whose first part failed: it would fail again."""
        self._active.discard(run.seed)
        self._waiting = [other for other in self._waiting if other.seed != run.seed]
        return None

    def describe(self, active: Sequence[SeedRun], done: int) -> str:
        return describe_runs(active, self._done, self._total, self._remaining)


def divide_runs(runs: Sequence[SeedRun], places: int) -> list[SeedRun]:
    """Return the runs in the order in which they start, some of them in two parts: to train to a number of samples.

    This is McNaughton's rule. Five equal runs in two places would need three rounds, and one place would be empty in
    the last. Instead, all places work for two and a half rounds: the first half of one run comes first, its second
    half last. If all runs were laid end to end and cut into one equal length for each place, each cut would divide a
    run: the part behind the cut begins that place, and the part before it ends the place before.
    """
    if len(runs) <= places:  # the parts of one run cannot train at the same time
        return list(runs)
    cuts = [Fraction(len(runs) * place, places) for place in range(1, places)]
    first_shares = [ceil(cut) - cut for cut in cuts if cut.denominator > 1]
    # Longest first part first: the second parts come in reverse order, because the longest must start early.
    first_shares.sort(reverse=True)
    divided, whole = runs[: len(first_shares)], runs[len(first_shares) :]
    stops = [max(1, int(share * run.steps)) for share, run in zip(first_shares, divided, strict=True)]
    first_parts = [replace(run, stop_at=stop) for run, stop in zip(divided, stops, strict=True)]
    return [*first_parts, *whole, *reversed(divided)]
