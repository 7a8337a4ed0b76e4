"""Status line in a file or pipe."""

import re
import time

import pytest

from lockstep.io import status_line
from lockstep.io.status_line import StatusLine


@pytest.fixture
def lines(monkeypatch):
    found = []
    monkeypatch.setattr(status_line, "STATUS_SECONDS", 0.01)
    monkeypatch.setattr(status_line, "write_text", lambda _, text: found.append(text))
    return found


def wait_for(text, lines):
    while not any(re.fullmatch(rf"lockstep: {text}, \d+ s\n", line) for line in lines):
        time.sleep(0.01)


def test_status_line_shows_text_and_seconds_until_stopped(lines):
    status = StatusLine()
    status.start("importing torch")
    wait_for("importing torch", lines)
    status.update(lambda: "starting")
    wait_for("starting", lines)
    status.stop()
    count = len(lines)
    status.stop()  # no effect
    time.sleep(0.05)
    assert len(lines) == count


def test_status_line_is_not_printed_by_quick_work(lines, monkeypatch):
    monkeypatch.setattr(status_line, "STATUS_SECONDS", 3600.0)
    status = StatusLine()
    status.start("starting")
    status.stop()
    assert lines == []
