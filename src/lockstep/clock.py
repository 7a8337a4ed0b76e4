"""Progress of a run: global samples, evaluations and pooled metrics."""

import math
from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Global samples, the only counter; schedules, difficulty and gates are functions of it."""

    total_samples: int
    samples: int = 0
    iteration: int = 0
    last_iteration_samples: int = 0
    """Samples of the last iteration, so that `every` sees what was crossed."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The last agreed evaluation."""
    best: float | None = None
    """The best evaluation score so far."""
    evaluations: int = 0
    """How many evaluations there were."""
    evals_since_best: int = 0
    """How many of them there were since the best."""
    patience: int | None = None
    """The run is over after so many evaluations without a better one; none waits for the budget."""
    eval_pending: bool = False
    """Whether an evaluation is due that has not been made: a request to stop may come in the middle of one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last pooled metrics, means over the time between two log entries."""
    metric_sums: dict[str, list[float]] = field(default_factory=dict)
    """Pooled (sum, count) by name since the last log entry; here, so that a kill between two entries loses none."""

    @property
    def done(self) -> bool:
        return self.samples >= self.total_samples or (
            self.patience is not None and self.evals_since_best >= self.patience
        )

    @property
    def progress(self) -> float:
        """From 0 at the start to 1 at the budget."""
        return min(1.0, self.samples / self.total_samples)

    def advance(self, samples: int) -> None:
        self.samples, self.iteration, self.last_iteration_samples = self.samples + samples, self.iteration + 1, samples

    def accumulate(self, totals: dict[str, tuple[float, float]]) -> None:
        """Add the pooled sums and counts of an iteration."""
        for name, (total, count) in totals.items():
            before = self.metric_sums.get(name, [0.0, 0.0])
            self.metric_sums[name] = [before[0] + total, before[1] + count]

    def record_evaluation(self, evaluation: dict[str, float]) -> bool:
        """Keep an agreed evaluation; whether it is the best so far, which a score that is not a number never is."""
        self.evaluation, self.eval_pending = evaluation, False
        score = evaluation["score"] if "score" in evaluation else evaluation["return_mean"]
        better = not math.isnan(score) and (self.best is None or score > self.best)
        self.best = score if better else self.best
        self.evaluations, self.evals_since_best = self.evaluations + 1, 0 if better else self.evals_since_best + 1
        return better

    def flush_metrics(self) -> dict[str, float]:
        """Turn what is pending into means. Names that counted nothing are left out."""
        self.metrics = {name: total / count for name, (total, count) in self.metric_sums.items() if count}
        self.metric_sums = {}
        return self.metrics

    def crossed(self, interval: int | None) -> bool:
        """True when the last iteration crossed a multiple of `interval`; never for None or 0."""
        return (
            interval is not None
            and interval > 0
            and self.samples // interval > (self.samples - self.last_iteration_samples) // interval
        )
