"""Status message while torch is imported or processes start."""

import os
import pty
import subprocess
import sys

import pytest

IMPORT = "from lockstep.cli.torch_import import import_torch_with_status; import_torch_with_status()"
START = """
from lockstep.cli import workers
from lockstep.launch import launcher
from lockstep.launch.rendezvous import LaunchConfig
launcher.launch = lambda *_: launcher.LaunchResult(0)
workers.launch_and_report([], LaunchConfig(2))
"""


def on_a_terminal(code=IMPORT, **environment):
    """Return what a process writes to its terminal."""
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
            its.write(b".")  # makes the read below return
        return terminal.read(10_000)


def test_torch_import_shows_status_on_terminal():
    assert b"importing torch" in on_a_terminal()


@pytest.mark.parametrize("started", ["LOCKSTEP_LAUNCH_DIR", "TORCHELASTIC_RUN_ID"])
def test_torch_import_in_worker_shows_no_status(started):
    assert on_a_terminal(**{started: "somewhere"}) == b"."


def test_process_start_shows_status_on_terminal():
    assert b"Starting 2 processes..." in on_a_terminal(START)


def test_process_start_without_terminal_is_not_shown():
    ended = subprocess.run([sys.executable, "-c", START], capture_output=True, timeout=120, check=True)
    assert ended.stderr == ended.stdout == b""


def test_torch_import_without_terminal_shows_plain_lines_only():
    ended = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, timeout=120, check=True)
    assert ended.stdout == b""
    assert all(line.startswith(b"lockstep: importing ") for line in ended.stderr.splitlines())
