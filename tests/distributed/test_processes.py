"""The helper the other tests stand on: values come back, failures are named, and a hang is a failure with stacks."""

import os
import signal
import sys
import time

import pytest
import torch.distributed as dist

from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from processes import Failed, Hung, command, outcomes, together

pytestmark = pytest.mark.distributed


def where_am_i(greeting):
    with Runtime.start(RunConfig(lanes=8)) as runtime:
        return [greeting, runtime.rank, runtime.size, runtime.all_gather_json(runtime.rank)]


def wait_for_one_who_never_comes():
    with Runtime.start(RunConfig(lanes=8, collective_timeout=600)) as runtime:
        if runtime.rank == 1:
            time.sleep(600)
        dist.barrier()


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise ValueError("one of us is wrong")
    return "well"


def die_on_one():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


def test_every_process_returns_its_value():
    assert together(where_am_i, 3, "here") == [["here", rank, 3, [0, 1, 2]] for rank in range(3)]


def test_a_hang_is_a_failure_that_shows_where_each_process_stood():
    with pytest.raises(Hung) as hung:
        together(wait_for_one_who_never_comes, 2, seconds=3)
    words = str(hung.value)
    assert "process 0: ended by SIGABRT" in words
    assert "barrier" in words.partition("process 1")[0]
    assert "wait_for_one_who_never_comes" in words.partition("process 1")[2]


def test_a_hanging_command_is_a_failure_that_shows_where_it_stood():
    with pytest.raises(Hung, match="in forever"):
        command([sys.executable, "-c", "import time\ndef forever(): time.sleep(600)\nforever()"], seconds=1)


def test_an_error_on_one_process_is_named():
    with pytest.raises(Failed, match=r"process 1: ValueError: one of us is wrong"):
        together(fail_on_one, 2)


def test_a_killed_process_is_told_from_one_that_failed():
    assert [outcome.error for outcome in outcomes(die_on_one, 2)] == ["", "ended by SIGKILL"]
