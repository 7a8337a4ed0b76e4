"""A run that is killed takes along whoever films for it."""

import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from claims import claim
from lockstep.checkpoint.naming import CheckpointName
from lockstep.clock import TrainState
from lockstep.loggers import video as films
from lockstep.loggers.video import VideoRecorder
from processes import outcomes

pytestmark = pytest.mark.distributed
FILMING = "import time; from lockstep.cli import main; main(['ls', '/nowhere']); time.sleep(600)"
"""Enters the command line as every film does, and then takes its time."""


def killed_while_filming(directory: str) -> None:
    """Stands for a run: it has a best policy, begins its film, and is killed."""
    run = Path(directory)
    (run / "checkpoints" / str(CheckpointName(8, 1))).mkdir(parents=True)
    claim(run / "checkpoints", None)
    (run / "checkpoints" / "best").write_text(str(CheckpointName(8, 1)))
    film = VideoRecorder(run, True, print, lambda: None)
    film.evaluation(TrainState(total_samples=8, samples=8))
    with patch.object(films, "command", lambda *_: [sys.executable, "-P", "-c", FILMING]):
        film.poll()
    (run / "pid").write_text(str(psutil.Process().children()[0].pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nobody_films_for_a_run_that_was_killed(tmp_path):
    (ended,) = outcomes(killed_while_filming, 1, str(tmp_path))
    assert ended.error == "ended by SIGKILL"
    pid, end = int((tmp_path / "pid").read_text()), time.monotonic() + 30.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
