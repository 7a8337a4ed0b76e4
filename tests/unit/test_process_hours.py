"""Process-hours of a run: used and lost over its starts, and status files that cannot be trusted."""

import json

import pytest

from lockstep.checkpoint.naming import CheckpointName
from lockstep.process_hours import ProcessHours, read_process_hours


def start(hours, resumed, processes, generation, seconds, saves=()):
    following = hours.next_start(resumed, processes, generation)
    following.seconds, following.saves = seconds, list(saves)
    return following


@pytest.fixture
def first():
    """Return a start of 4 processes for 100 s, with saves after 40 and 80 s."""
    return start(ProcessHours(), None, 4, 1, 100.0, [(1000, 40.0), (2000, 80.0)])


@pytest.mark.parametrize(
    ("resumed", "lost"),
    [
        (CheckpointName(2000, 1), 4 * 20.0),
        (CheckpointName(1000, 1), 4 * 60.0),  # the newest checkpoint was damaged
        (CheckpointName(3000, 1), 0.0),  # saved after the status was written
        (CheckpointName(500, 1), 4 * 100.0),
        (None, 4 * 100.0),
        (CheckpointName(3000, 7), 4 * 100.0),  # of another start: this one saved nothing
    ],
)
def test_time_after_the_checkpoint_is_lost(first, resumed, lost):
    second = start(first, resumed, 2, 2, 50.0)
    assert (second.lost, second.total) == (lost, 4 * 100.0 + 2 * 50.0)


def test_hours_of_many_starts_add_up(first):
    second = start(first, CheckpointName(2000, 1), 2, 2, 50.0, [(2500, 20.0)])
    third = start(second, CheckpointName(2500, 2), 1, 3, 3600.0)
    assert third.lost == 4 * 20.0 + 2 * 30.0
    assert third.as_json()["process_hours"]["used"] == pytest.approx((400 + 100 + 3600) / 3600, abs=1e-6)
    assert third.as_json()["process_hours"]["lost"] == pytest.approx(140 / 3600, abs=1e-6)


def test_status_gives_back_what_was_written(first):
    assert read_process_hours(json.loads(json.dumps(first.as_json()))) == first


@pytest.mark.parametrize("value", [None, -1, 1e300, "1", [], float("nan"), [[1]]])
@pytest.mark.parametrize("name", ["used", "lost", "processes", "generation", "seconds", "saves"])
def test_invalid_status_has_no_hours(first, name, value):
    status = first.as_json()
    status["process_hours"]["newest_start"][name] = value
    if name == "saves" and value == []:
        assert read_process_hours(status).saves == []
    else:
        assert read_process_hours(status) is None


@pytest.mark.parametrize("status", [{}, {"process_hours": 3}, {"process_hours": {"newest_start": []}}])
def test_status_without_hours(status):
    assert read_process_hours(status) is None
