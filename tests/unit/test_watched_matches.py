"""A chase as it is watched: the closest first, what was said before each delivery, and what came of it."""

import json

import numpy as np
import pytest
from test_cricket import build, delivery, match

from lockstep.tasks.cricket.playback import closest_matches
from lockstep.tasks.rendering.line_chart import braille_chart


def overs(*runs):
    """Overs of six balls with so many runs each."""
    return {number: [delivery(each)] * 6 for number, each in enumerate(runs)}


@pytest.fixture
def chases(tmp_path):
    """Settings for forty matches, half of which went to their last ball."""
    (tmp_path / "data").mkdir()
    for number in range(40):
        short, close = match(overs(2), overs(1), "One"), match(overs(*[1] * 20), overs(*[1] * 20), "One")
        (tmp_path / "data" / f"{number}.json").write_text(json.dumps(close if number % 2 else short))
    return {"data": str(tmp_path / "data"), "cache_dir": str(tmp_path / "cache"), "min_name_count": 1}


def test_chases_that_went_to_the_last_ball_come_first(chases):
    task = build(**chases, target="win")
    lengths = task.archive.innings[closest_matches(task.archive, task.matches["train"]), 1]
    assert set(lengths) == {6, 120}
    assert (np.diff(lengths) <= 0).all()


def test_the_closest_chase_is_shown_delivery_by_delivery(chases):
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
    assert seen[120].said()[-1] == 0.0  # what came true
    assert seen[0].render().shape == seen[120].render().shape == (360, 640, 3)


def test_a_score_is_shown_where_it_will_be_known(chases):
    task = build(**chases, target="score")
    seen = list(task.playback("train", 0, lambda rows: task.targets("train")[rows]))
    chase = seen[0].chase
    assert chase.runs.tolist() == list(range(1, 121))  # from the second delivery on, and in the end
    assert np.allclose(chase.said, chase.runs[chase.mark])  # a perfect prediction meets the score at its mark
    assert "predicted: 30 after 5 overs" in seen[0].render_text()
    assert seen[-1].render_text().endswith("over 20.0   120/0   the chase failed")
    assert (seen[50].render() != seen[51].render()).any()


def test_a_curve_of_dots_does_not_break():
    rising = braille_chart(np.arange(3.0), width=6, rows=2, whole=3, up=(0.0, 2.0))
    dots = np.array([[ord(mark) - 0x2800 for mark in line] for line in rising])
    assert (dots[:, :5].sum(axis=0) > 0).all()  # up to where the last number stands
    assert dots[1, 0]  # low at first,
    assert not dots[0, 0]
    assert dots[0, 4]  # and high in the end
    assert not dots[1, 4] & 0b11000000


def test_what_is_no_number_or_beyond_the_edge_ends_no_show():
    (line,) = braille_chart(np.array([np.nan, 9.0, -9.0]), 3, 1, 3, (0.0, 1.0))
    assert line[0] == "\u2800"
    assert all(mark != "\u2800" for mark in line[1:])
