"""Saves come as often as they are cheap."""

import pytest

from lockstep.run import cadence
from lockstep.run.cadence import FIRST, LEAST, MOST, SHARE, Cadence


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(cadence.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("cost", "interval"), [(0.001, LEAST), (0.5, 0.5 / SHARE), (60.0, MOST)])
def test_saves_take_a_hundredth_of_the_time_within_bounds(cost, interval):
    pace = Cadence()
    assert pace.interval == FIRST
    pace.learn(cost)
    assert pace.interval == interval


def test_a_save_is_due_when_the_interval_since_the_last_one_is_over(clock):
    pace = Cadence()
    assert not pace.due
    clock[0] += FIRST + 1
    assert pace.due
    pace.begin()
    pace.learn(0.2)
    assert not pace.due
    clock[0] += 0.2 / SHARE + 1
    assert pace.due


def test_the_interval_is_told_when_it_has_changed_much():
    pace = Cadence()
    assert pace.learn(0.5) == "Saving every 50 s: a save takes 0.50 s of work."
    assert pace.learn(0.6) == ""
    assert pace.learn(2.0) == "Saving every 200 s: a save takes 2.00 s of work."
