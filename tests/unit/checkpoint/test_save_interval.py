"""The automatic save interval follows from the cost of a save."""

import pytest

from lockstep.checkpoint import save_interval
from lockstep.checkpoint.save_interval import FIRST_INTERVAL, MAX_INTERVAL, MIN_INTERVAL, TIME_SHARE, SaveInterval


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(save_interval.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("cost", "interval"), [(0.001, MIN_INTERVAL), (0.5, 0.5 / TIME_SHARE), (60.0, MAX_INTERVAL)])
def test_save_interval_is_cost_over_share_within_bounds(cost, interval):
    pace = SaveInterval()
    assert pace.interval == FIRST_INTERVAL
    pace.update(cost)
    assert pace.interval == interval


def test_save_is_due_when_interval_has_passed(clock):
    pace = SaveInterval()
    assert not pace.due
    clock[0] += FIRST_INTERVAL + 1
    assert pace.due
    pace.begin()
    pace.update(0.2)
    assert not pace.due
    clock[0] += 0.2 / TIME_SHARE + 1
    assert pace.due


def test_update_returns_message_only_on_large_change():
    pace = SaveInterval()
    assert pace.update(0.5) == "Saving every 50 s: a save takes 0.50 s of work."
    assert pace.update(0.6) == ""
    assert pace.update(2.0) == "Saving every 200 s: a save takes 2.00 s of work."
