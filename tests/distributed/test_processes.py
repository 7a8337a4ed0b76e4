"""The multiprocess test helper: returns values, names failed processes, and turns hangs into failures with stacks."""

import os
import signal
import sys
import time

import pytest
import torch.distributed as dist

from helpers.multiprocess import Failed, Hung, command, outcomes, together
from lockstep.config import RunConfig
from lockstep.distributed import Runtime

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


def test_together_returns_the_value_of_every_process():
    assert together(where_am_i, 3, "here") == [["here", rank, 3, [0, 1, 2]] for rank in range(3)]


def test_together_hang_fails_with_the_stack_of_each_process():
    with pytest.raises(Hung) as hung:
        together(wait_for_one_who_never_comes, 2, seconds=3)
    words = str(hung.value)
    assert "process 0: ended by SIGABRT" in words
    assert "barrier" in words.partition("process 1")[0]
    assert "wait_for_one_who_never_comes" in words.partition("process 1")[2]


def test_command_hang_fails_with_its_stack():
    with pytest.raises(Hung, match="in forever"):
        command([sys.executable, "-c", "import time\ndef forever(): time.sleep(600)\nforever()"], seconds=1)


def test_together_error_names_the_process():
    with pytest.raises(Failed, match=r"process 1: ValueError: one of us is wrong"):
        together(fail_on_one, 2)


def test_outcomes_reports_the_signal_of_a_killed_process():
    assert [outcome.error for outcome in outcomes(die_on_one, 2)] == ["", "ended by SIGKILL"]
