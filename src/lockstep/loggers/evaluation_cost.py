"""Expected time of the evaluations that a run still has to do."""

from lockstep.clock import TrainState
from lockstep.config import DEFAULT_EVAL_EPISODES, RunConfig


class EvaluationCost:
    """Seconds of the latest evaluation, and from that the seconds of all evaluations still to come."""

    def __init__(self, run: RunConfig) -> None:
        self.eval_every, self.eval_episodes = run.eval_every, run.eval_episodes
        self._evaluations = 0
        self._seconds = 0.0

    def measured(self, seconds: float, clock: TrainState) -> None:
        """Record the seconds that were spent on the evaluations since the last call."""
        if clock.evaluations > self._evaluations and seconds > 0.0:
            self._seconds = seconds / (clock.evaluations - self._evaluations)
        self._evaluations = clock.evaluations

    def remaining_seconds(self, clock: TrainState) -> float:
        """Estimate the seconds of the evaluations to come; 0 before the first one has been measured."""
        if not self.eval_every:
            return 0.0
        # The run ends with an evaluation, also if its total is not a multiple of the interval.
        remaining = -(-clock.total_samples // self.eval_every) - clock.samples // self.eval_every
        due_now = clock.crossed(self.eval_every) or clock.done  # the log entry precedes the evaluation
        evaluations = float(max(0, remaining) + due_now)
        if self.eval_episodes is None and evaluations:  # the last one may play more episodes
            episodes = clock.evaluation.get("episodes", DEFAULT_EVAL_EPISODES)
            steps = clock.total_samples / (2 * self.eval_every)
            evaluations += max(0.0, min(DEFAULT_EVAL_EPISODES / episodes, steps) - 1.0)
        return self._seconds * evaluations
