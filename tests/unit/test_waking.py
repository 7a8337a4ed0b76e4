"""While torch is imported somebody who looks at a terminal reads so, and nobody else does."""

import os
import pty
import subprocess
import sys

import pytest

WAKE = "from lockstep.cli.waking import wake; wake()"


def on_a_terminal(**environment):
    """What a process that wakes writes to its terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        with os.fdopen(theirs, "wb", buffering=0) as its:
            subprocess.run(
                [sys.executable, "-c", WAKE],
                stderr=its,
                env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
                timeout=120,
                check=True,
            )
            its.write(b".")  # so that there is something to read
        return terminal.read(10_000)


def test_whoever_waits_for_torch_reads_so():
    assert b"waking torch" in on_a_terminal()


@pytest.mark.parametrize("started", ["LOCKSTEP_LAUNCHED", "TORCHELASTIC_RUN_ID"])
def test_one_of_many_says_nothing(started):
    assert on_a_terminal(**{started: "somewhere"}) == b"."


def test_nothing_is_said_where_nobody_looks():
    ended = subprocess.run([sys.executable, "-c", WAKE], capture_output=True, timeout=120, check=True)
    assert ended.stderr == ended.stdout == b""
