"""While torch is imported, here or by processes to come, whoever looks at a terminal reads so; nobody else does."""

import os
import pty
import subprocess
import sys

import pytest

WAKE = "from lockstep.cli.torch_import import import_torch_with_status; import_torch_with_status()"
START = """
from lockstep.cli import workers
from lockstep.launch import launcher
from lockstep.launch.rendezvous import LaunchConfig
launcher.launch = lambda *_: launcher.LaunchResult(0)
workers.launch_and_report([], LaunchConfig(2))
"""


def on_a_terminal(code=WAKE, **environment):
    """What a process that wakes writes to its terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with os.fdopen(theirs, "wb", buffering=0) as its:
            subprocess.run(
                [sys.executable, "-c", code],
                stderr=its,
                env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
                timeout=120,
                check=True,
            )
            its.write(b".")  # so that there is something to read
        return terminal.read(10_000)


def test_whoever_waits_for_torch_reads_so():
    assert b"waking torch" in on_a_terminal()


@pytest.mark.parametrize("started", ["LOCKSTEP_LAUNCH_DIR", "TORCHELASTIC_RUN_ID"])
def test_one_of_many_says_nothing(started):
    assert on_a_terminal(**{started: "somewhere"}) == b"."


def test_whoever_waits_for_processes_reads_so():
    assert b"waking 2 processes" in on_a_terminal(START)


@pytest.mark.parametrize("code", [WAKE, START])
def test_nothing_is_said_where_nobody_looks(code):
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    assert ended.stderr == ended.stdout == b""
