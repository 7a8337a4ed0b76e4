"""Saves come as often as they are cheap."""

import pytest

from lockstep.checkpoint import save_interval
from lockstep.checkpoint.save_interval import FIRST, LEAST, MOST, SHARE, SaveInterval


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(save_interval.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("cost", "interval"), [(0.001, LEAST), (0.5, 0.5 / SHARE), (60.0, MOST)])
def test_saves_take_a_hundredth_of_the_time_within_bounds(cost, interval):
    pace = SaveInterval()
    assert pace.interval == FIRST
    pace.update(cost)
    assert pace.interval == interval


def test_a_save_is_due_when_the_interval_since_the_last_one_is_over(clock):
    pace = SaveInterval()
    assert not pace.due
    clock[0] += FIRST + 1
    assert pace.due
    pace.begin()
    pace.update(0.2)
    assert not pace.due
    clock[0] += 0.2 / SHARE + 1
    assert pace.due


def test_the_interval_is_told_when_it_has_changed_much():
    pace = SaveInterval()
    assert pace.update(0.5) == "Saving every 50 s: a save takes 0.50 s of work."
    assert pace.update(0.6) == ""
    assert pace.update(2.0) == "Saving every 200 s: a save takes 2.00 s of work."
