"""Playback of one chase, delivery by delivery: win probability, or predicted score.

Shapes: T deliveries of the chase.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.config import ConfigError
from lockstep.ops import prediction_metrics
from lockstep.tasks.cricket.cricsheet import BALL, FEATURES, MatchArchive, mark_of
from lockstep.tasks.rendering.line_chart import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    RED,
    WHITE,
    Axes,
    Canvas,
    Color,
    add_axes,
    braille_chart,
    fitting_size,
)

WIDTH, HEIGHT = 640, 384
END_FRAMES = 12
"""How often the last frame is repeated, so that it can be read."""


@dataclass(frozen=True)
class InningsReplay:
    """A finished chase, and the predictions before each of its deliveries."""

    title: str
    target: int
    """Runs needed to win."""
    runs: np.ndarray
    """[T + 1] runs before each delivery, and at the end."""
    wickets: np.ndarray
    """[T + 1] wickets before each delivery, and at the end."""
    legal: np.ndarray
    """[T + 1] legal balls before each delivery, and at the end."""
    over: np.ndarray
    """[T] from zero."""
    six: np.ndarray
    """[T] bool."""
    predictions: np.ndarray
    """[T] predictions before each delivery: win probability, or score at the mark."""
    mark: np.ndarray
    """[T] the delivery at which the predicted score is reached."""
    classify: bool
    """Whether predictions are win probabilities."""
    won: bool

    @property
    def width(self) -> int:
        """Width of the chart in deliveries."""
        return max(120, len(self.over)) + 3


@dataclass(frozen=True)
class ReplayFrame:
    """A chase before one of its deliveries, or at the end."""

    chase: InningsReplay
    now: int
    """From 0 to T."""

    @property
    def ended(self) -> bool:
        return self.now == len(self.chase.over)

    def win_probabilities(self) -> np.ndarray:
        """Return the win probabilities so far; at the end, followed by the result."""
        predictions = self.chase.predictions[: self.now + 1]
        return np.append(predictions, float(self.chase.won)) if self.ended else predictions

    def score_line(self) -> str:
        """Return the score line."""
        chase, now = self.chase, self.now
        score = f"over {chase.legal[now] // 6}.{chase.legal[now] % 6}   {chase.runs[now]}/{chase.wickets[now]}"
        if self.ended:
            return f"{score}   the chase {'succeeded' if chase.won else 'failed'}"
        needs = chase.target - chase.runs[now]
        last = f"   last ball: {_ball(chase, now - 1)}" if now else ""
        return f"{score}   needs {needs} from {max(0, 120 - chase.legal[now])}{last}"

    def forecast(self) -> str:
        """Return the current prediction as text."""
        chase = self.chase
        if self.ended:
            return ("won" if chase.won else "lost") if chase.classify else f"{chase.runs[-1]}"
        if chase.classify:
            return f"{chase.predictions[self.now]:.0%}"
        return f"{chase.predictions[self.now]:.0f} after {mark_of(int(chase.over[self.now]))} overs"

    def render_text(self) -> str:
        chase = self.chase
        if chase.classify:
            lines, labels = braille_chart(self.win_probabilities(), 64, 8, chase.width, (0.0, 1.0)), ("100%", "0%")
        else:
            curve = np.full(chase.width, np.nan)
            curve[: self.now + 1] = chase.runs[: self.now + 1]
            if not self.ended:
                curve[max(chase.mark[self.now], self.now + 2)] = chase.predictions[self.now]
            lines = braille_chart(curve, 64, 8, chase.width, (0.0, _max_score(chase)))
            labels = (f"{_max_score(chase):.0f}", "0")
        kind = "chance to win" if chase.classify else "predicted"
        forecast = [] if self.ended else [f"{kind}: {self.forecast()}"]
        return "\n".join([chase.title, add_axes(lines, labels), self.score_line(), *forecast])

    def render(self) -> np.ndarray:
        chase, canvas = self.chase, Canvas(WIDTH, HEIGHT)
        y_range = (0.0, 100.0) if chase.classify else (0.0, _max_score(chase))
        axes = Axes(canvas, 52, 102, WIDTH - 20, HEIGHT - 34, (0, chase.width), y_range)
        canvas.write(16, 28, chase.title, fitting_size(chase.title, WIDTH - 32, 16))
        canvas.write(16, 54, self.score_line(), 14, GRAY)
        starts = np.flatnonzero(np.diff(chase.over, prepend=-1))  # where overs begin
        for start in starts[chase.over[starts] % 5 == 0]:
            axes.tick(start, f"{chase.over[start]}")
        axes.tick(chase.width - 3, "overs")
        (self._draw_win_probability if chase.classify else self._draw_score)(axes)
        return canvas.to_array()

    def _draw_win_probability(self, axes: Axes) -> None:
        chase, line = self.chase, 100 * self.win_probabilities()
        for level in (0, 50, 100):
            axes.gridline(level, f"{level}%")
        axes.curve(np.arange(len(line)), line, BLUE, 2.5)
        for ball in np.flatnonzero(chase.six[: self.now]):
            axes.canvas.dot(*axes.to_pixels(int(ball), line[ball]), 3.5, ORANGE)
        for ball in self._wicket_balls():
            axes.canvas.dot(*axes.to_pixels(int(ball), line[ball]), 4.5, RED)
        axes.canvas.dot(*axes.to_pixels(len(line) - 1, line[-1]), 5, WHITE)
        _legend(axes.canvas, ("wicket", RED), ("six", ORANGE))
        color = GREEN if line[-1] >= 50 else RED
        axes.canvas.write(WIDTH - 20, 68, self.forecast(), 34, color, "rm")

    def _draw_score(self, axes: Axes) -> None:
        chase, now = self.chase, self.now
        for level in range(0, int(axes.y_range[1]) + 1, 50):
            axes.gridline(level, f"{level}")
        axes.canvas.dash(axes.to_pixels(0, chase.target), axes.to_pixels(chase.width, chase.target), GRAY)
        axes.canvas.write(axes.left + 4, axes.to_pixels(0, chase.target)[1] + 14, f"target {chase.target}", 12, GRAY)
        for ball in range(min(now + 1, len(chase.over))):
            axes.canvas.dot(*axes.to_pixels(chase.mark[ball], chase.predictions[ball]), 2.5, ORANGE)
        axes.curve(np.arange(now + 1), chase.runs[: now + 1], BLUE, 2.5)
        for ball in self._wicket_balls():
            axes.canvas.dot(*axes.to_pixels(ball, chase.runs[ball]), 4.5, RED)
        current = axes.to_pixels(now, chase.runs[now])
        if not self.ended:
            predicted = axes.to_pixels(chase.mark[now], chase.predictions[now])
            axes.canvas.dash(current, predicted, ORANGE, 1.5)
            axes.canvas.dot(*predicted, 5, ORANGE)
        axes.canvas.dot(*current, 5, WHITE)
        _legend(axes.canvas, ("score", BLUE), ("predicted", ORANGE), ("wicket", RED))
        axes.canvas.write(WIDTH - 20, 70, self.forecast(), 26, WHITE if self.ended else ORANGE, "rm")

    def _wicket_balls(self) -> np.ndarray:
        """Return the deliveries so far that took a wicket."""
        return np.flatnonzero(np.diff(self.chase.wickets[: self.now + 1]))


def replay(
    archive: MatchArchive,
    matches: np.ndarray,
    examples: np.ndarray,
    number: int,
    predict: Callable[[np.ndarray], np.ndarray],
    classify: bool,
) -> Iterator[ReplayFrame]:
    """Frames of one chase: number 0 is the closest, number 1 the next closest.

    Args:
        archive: All matches.
        matches: Numbers of the matches to choose from.
        examples: Deliveries of these matches that can be predicted, as rows of `archive.balls`.
        number: Which chase.
        predict: Predictions for positions in `examples`.
        classify: Whether predictions are logits of winning, not runs.
    """
    chases = closest_matches(archive, matches)
    innings = int(chases[number % len(chases)])
    rows = np.flatnonzero(archive.innings_of[examples] == innings)
    deliveries = examples[rows]
    balls = {name: archive.balls[deliveries, column].astype(int) for column, name in enumerate(BALL)}
    state = {name: archive.features[deliveries, FEATURES.index(name)] for name in ("runs", "wickets", "legal")}
    ends = {"runs": balls["bat"] + balls["extras"], "wickets": balls["wicket"], "legal": 1 - balls["illegal"]}
    score = {name: np.append(values, values[-1] + ends[name][-1]).astype(int) for name, values in state.items()}
    predictions = predict(rows)
    marks = np.array([mark_of(over) for over in balls["over"]])
    target = int(archive.features[deliveries[0], FEATURES.index("target")])
    chase = InningsReplay(
        title=archive.title(innings),
        target=target,
        **score,
        over=balls["over"],
        six=balls["bat"] == 6,
        predictions=prediction_metrics.sigmoid(predictions) if classify else score["runs"][:-1] + predictions,
        mark=np.searchsorted(np.maximum.accumulate(balls["over"]), marks, side="left"),
        classify=classify,
        won=bool(score["runs"][-1] >= target),
    )
    for now in range(len(chase.over)):
        yield ReplayFrame(chase, now)
    for _ in range(END_FRAMES):
        yield ReplayFrame(chase, len(chase.over))


def closest_matches(archive: MatchArchive, matches: np.ndarray) -> np.ndarray:
    """Return the innings numbers of the chases of some matches, closest finish first."""
    chases = np.flatnonzero((archive.innings[:, 3] == 1) & np.isin(archive.innings[:, 2], matches))
    chases = chases[archive.innings[chases, 1] > 1]
    if not len(chases):
        raise ConfigError("no match of this split has a chase to watch.", "Use more matches.")
    last = archive.innings[chases, 0] + archive.innings[chases, 1] - 1
    remaining, needed = (archive.features[last, FEATURES.index(name)] for name in ("left", "needed"))
    # Closeness before the last ball: distance of the needed runs from 3, plus the unused balls.
    return chases[np.argsort(np.abs(needed - 3) + remaining, kind="stable")]


def _legend(canvas: Canvas, *names: tuple[str, Color]) -> None:
    """Draw the legend below the score."""
    for index, (name, color) in enumerate(names):
        canvas.dot(20 + 80 * index, 76, 4, color)
        canvas.write(30 + 80 * index, 76, name, 12, GRAY, "lm")


def _max_score(chase: InningsReplay) -> float:
    """Return a round number above all scores in the chart."""
    return float(np.ceil(max(chase.target, chase.runs.max(), chase.predictions.max()) * 1.05 / 10) * 10)


def _ball(chase: InningsReplay, ball: int) -> str:
    """Describe the outcome of a delivery."""
    if chase.wickets[ball + 1] > chase.wickets[ball]:
        return "OUT"
    runs = chase.runs[ball + 1] - chase.runs[ball]
    return str(runs) if runs else "no run"
