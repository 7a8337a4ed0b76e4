"""Progress of a run: global samples, evaluations and pooled metrics."""

import math
from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Training state. Schedules and curricula are functions of the global samples, not of iterations or time."""

    total_samples: int
    samples: int = 0
    iteration: int = 0
    last_iteration_samples: int = 0
    """Samples of the last iteration, for `crossed`."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Latest evaluation, equal on all processes."""
    best: float | None = None
    """Best evaluation score so far."""
    evaluations: int = 0
    """Number of evaluations."""
    evals_since_best: int = 0
    """Number of evaluations since the best one."""
    patience: int | None = None
    """Stop after this number of evaluations without a new best. None: no early stopping."""
    eval_pending: bool = False
    """Whether an evaluation is due: a stop request may interrupt one, which then reruns after resume."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest metrics: means since the previous log entry."""
    metric_sums: dict[str, list[float]] = field(default_factory=dict)
    """Pooled (sum, count) by name since the last log entry. Part of the checkpoint, so that a kill loses none."""

    @property
    def done(self) -> bool:
        stopped_early = self.patience is not None and self.evals_since_best >= self.patience
        return stopped_early or self.samples >= self.total_samples

    @property
    def progress(self) -> float:
        """Fraction of total_samples, from 0 to 1."""
        return min(1.0, self.samples / self.total_samples)

    def reached(self, samples: int | None) -> bool:
        """Return whether `samples` are trained and no evaluation of them is due. Always False for None."""
        return samples is not None and self.samples >= samples and not self.eval_pending

    def advance(self, samples: int) -> None:
        self.samples, self.iteration, self.last_iteration_samples = self.samples + samples, self.iteration + 1, samples

    def accumulate(self, totals: dict[str, tuple[float, float]]) -> None:
        """Add the pooled sums and counts of an iteration. Skip names without counts, which are equal everywhere."""
        for name, (total, count) in totals.items():
            if not count:
                continue
            before = self.metric_sums.get(name, [0.0, 0.0])
            self.metric_sums[name] = [before[0] + total, before[1] + count]

    def record_evaluation(self, evaluation: dict[str, float]) -> bool:
        """Record an evaluation. Return whether it is the best so far; a NaN score never is."""
        self.evaluation, self.eval_pending = evaluation, False
        score = evaluation["score"] if "score" in evaluation else evaluation["return_mean"]
        better = not math.isnan(score) and (self.best is None or score > self.best)
        self.best = score if better else self.best
        self.evaluations, self.evals_since_best = self.evaluations + 1, 0 if better else self.evals_since_best + 1
        return better

    def flush_metrics(self) -> dict[str, float]:
        """Convert the pending sums to means and clear them. Skip names without counts."""
        self.metrics = {name: total / count for name, (total, count) in self.metric_sums.items() if count}
        self.metric_sums = {}
        return self.metrics

    def crossed(self, interval: int | None) -> bool:
        """Return whether the last iteration crossed a multiple of `interval`. Always False for None or 0."""
        if interval is None or interval <= 0:
            return False
        return self.samples // interval > (self.samples - self.last_iteration_samples) // interval
