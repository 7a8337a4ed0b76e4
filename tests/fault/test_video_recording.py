"""The video recording process of a run ends when the run is killed."""

import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from helpers.claims import claim
from helpers.multiprocess import outcomes
from lockstep.checkpoint.naming import CheckpointName
from lockstep.clock import TrainState
from lockstep.loggers import video as films
from lockstep.loggers.video import VideoRecorder

pytestmark = pytest.mark.distributed
RECORDING = "import time; from lockstep.cli import main; main(['ls', '/nowhere']); time.sleep(600)"
"""Code that calls the command line like a recording process, and then sleeps."""


def killed_while_recording(directory: str) -> None:
    """Act as a run that has a best policy, starts to record it, and is killed."""
    run = Path(directory)
    (run / "checkpoints" / str(CheckpointName(8, 1))).mkdir(parents=True)
    claim(run / "checkpoints", None)
    (run / "checkpoints" / "best").write_text(str(CheckpointName(8, 1)))
    recorder = VideoRecorder(run, True, print, lambda: None)
    recorder.evaluation(TrainState(total_samples=8, samples=8))
    with patch.object(films, "command", lambda *_: [sys.executable, "-P", "-c", RECORDING]):
        recorder.poll()
    (run / "pid").write_text(str(psutil.Process().children()[0].pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_recording_process_ends_when_the_run_is_killed(tmp_path):
    (ended,) = outcomes(killed_while_recording, 1, str(tmp_path))
    assert ended.error == "ended by SIGKILL"
    pid, end = int((tmp_path / "pid").read_text()), time.monotonic() + 30.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
