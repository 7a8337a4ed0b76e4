"""What the watchdog prints when a run is asked to stop."""

import re
import signal
import time

import pytest
import torch

from lockstep.distributed.process_status import ProcessStatus
from lockstep.distributed.watchdog import Watchdog
from lockstep.ops.compilation import COMPILE


@pytest.fixture
def watchdog():
    return Watchdog(ProcessStatus(0, 1, torch.device("cpu")), timeout=60.0, max_hours=None)


def message(watchdog, capsys):
    watchdog._on_signal(signal.SIGINT)
    assert watchdog.status.stop_requested
    return capsys.readouterr().err


def iteration(watchdog, updates, seconds=0.0):
    """Let an iteration end that took `seconds`."""
    watchdog.status.update += updates
    watchdog._iteration_end = time.monotonic() - seconds
    watchdog.mark_iteration_end()


def test_stop_message_in_first_iteration_gives_no_time_limit(watchdog, capsys):
    iteration(watchdog, updates=0)  # a collective during startup
    watchdog._iteration_end -= 100.0
    said = message(watchdog, capsys)
    assert "(running for 100 s; its duration is not known yet)" in said
    assert "within" not in said
    assert watchdog._exit_after is None


def test_stop_message_before_first_update_gives_no_time_limit(watchdog, capsys):
    iteration(watchdog, updates=0, seconds=0.1)  # random actions, before learning has started
    watchdog.longest_save = 0.1
    assert "its duration is not known yet" in message(watchdog, capsys)
    assert watchdog._exit_after is None


def test_stop_message_while_compiling_gives_no_time_limit(watchdog, capsys):
    iteration(watchdog, updates=1, seconds=0.1)
    watchdog.longest_save = 0.1
    watchdog.status.phases.append(COMPILE)
    assert "its duration is not known yet" in message(watchdog, capsys)


def test_stop_message_after_timed_iteration_gives_expected_seconds(watchdog, capsys):
    iteration(watchdog, updates=1, seconds=20.0)
    watchdog.longest_save = 1.0
    expected = re.search(r"expected within ([\d.]+) s, or exiting", message(watchdog, capsys))
    assert expected
    assert 21.0 <= float(expected[1]) < watchdog._exit_after


def test_stop_message_says_what_a_second_signal_does(watchdog, capsys):
    assert "To exit at once without saving, press Ctrl-C" in message(watchdog, capsys)
