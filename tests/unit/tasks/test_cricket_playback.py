"""Cricket playback: order of matches, predictions before each delivery, and the result."""

import json

import numpy as np
import pytest
from test_cricket import build, delivery, match

from lockstep.tasks.cricket.playback import closest_matches
from lockstep.tasks.rendering.line_chart import braille_chart


def overs(*runs):
    """Overs of six balls, each ball scoring the given number of runs."""
    return {number: [delivery(each)] * 6 for number, each in enumerate(runs)}


@pytest.fixture
def chases(tmp_path):
    """Settings for forty matches, half of which were decided on the last ball."""
    (tmp_path / "data").mkdir()
    for number in range(40):
        short, close = match(overs(2), overs(1), "One"), match(overs(*[1] * 20), overs(*[1] * 20), "One")
        (tmp_path / "data" / f"{number}.json").write_text(json.dumps(close if number % 2 else short))
    return {"data": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache"), "min_name_count": 1}


def test_closest_matches_lists_longest_chases_first(chases):
    task = build(**chases, target="win")
    lengths = task.archive.innings[closest_matches(task.archive, task.matches["train"]), 1]
    assert set(lengths) == {6, 120}
    assert (np.diff(lengths) <= 0).all()


def test_playback_of_win_target_shows_closest_chase_ball_by_ball(chases):
    task = build(**chases, target="win")
    asked = []

    def predict(rows):
        asked.append(rows)
        return np.linspace(-2.0, 2.0, len(rows))

    seen = list(task.playback("train", 0, predict))
    (rows,) = asked
    assert (
        task.archive.innings_of[task.examples["train"][rows]] == closest_matches(task.archive, task.matches["train"])[0]
    ).all()
    assert [moment.now for moment in seen[:120]] == list(range(120))
    assert {moment.now for moment in seen[120:]} == {120}
    assert "over 0.0   0/0   needs 121 from 120" in seen[0].render_text()
    assert "chance to win: 12%" in seen[0].render_text()  # 1 / (1 + e^2)
    assert "over 19.5   119/0   needs 2 from 1   last ball: 1\nchance to win: 88%" in seen[119].render_text()
    assert seen[120].render_text().endswith("over 20.0   120/0   the chase failed")
    assert seen[120].win_probabilities()[-1] == 0.0  # the actual result
    assert seen[0].render().shape == seen[120].render().shape == (384, 640, 3)
    assert seen[0].render_text().startswith("Two chase 121 against One, 2020-01-02\n")


def test_playback_of_score_target_places_prediction_at_its_mark(chases):
    task = build(**chases, target="score")
    seen = list(task.playback("train", 0, lambda rows: task.targets("train")[rows]))
    chase = seen[0].chase
    assert chase.runs.tolist() == list(range(1, 121))  # before each delivery from the second on, and at the end
    assert np.allclose(chase.predictions, chase.runs[chase.mark])  # a perfect prediction equals the score at its mark
    assert "predicted: 30 after 5 overs" in seen[0].render_text()
    assert seen[-1].render_text().endswith("over 20.0   120/0   the chase failed")
    assert (seen[50].render() != seen[51].render()).any()


def test_braille_chart_draws_continuous_curve():
    rising = braille_chart(np.arange(3.0), width=6, rows=2, num_values=3, y_range=(0.0, 2.0))
    dots = np.array([[ord(mark) - 0x2800 for mark in line] for line in rising])
    assert (dots[:, :5].sum(axis=0) > 0).all()  # up to the column of the last value
    assert dots[1, 0]  # low at the start
    assert not dots[0, 0]
    assert dots[0, 4]  # high at the end
    assert not dots[1, 4] & 0b11000000


def test_braille_chart_handles_nan_and_out_of_range_values():
    (line,) = braille_chart(np.array([np.nan, 9.0, -9.0]), 3, 1, 3, (0.0, 1.0))
    assert line[0] == "\u2800"
    assert all(mark != "\u2800" for mark in line[1:])
