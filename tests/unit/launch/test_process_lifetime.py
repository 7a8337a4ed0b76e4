"""Processes that end with the process that started them."""

import os
import subprocess
import sys

from lockstep.launch.process_lifetime import ENV_PARENT_PID, EXIT_PEER_FAILED

CHILD = """
import os, subprocess, sys
from lockstep.launch.process_lifetime import die_with_launcher
die_with_launcher()
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1], ""]).returncode if sys.argv[1] else 0)
"""


def run_child(parent: int) -> int:
    """Run a child with this parent's pid in its environment. It starts a child of its own, without setting it."""
    environment = os.environ | {ENV_PARENT_PID: str(parent)}
    return subprocess.run([sys.executable, "-c", CHILD, CHILD], env=environment).returncode


def test_helper_process_may_start_processes_and_exits_without_its_parent():
    assert run_child(os.getpid()) == 0
    assert run_child(1) == EXIT_PEER_FAILED
