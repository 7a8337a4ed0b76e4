"""Runs with replay: killed while writing or linking segments, and restored on other numbers of processes."""

import os
import signal
import threading
import time

import pytest
from run_helpers import errors

from helpers.multiprocess import outcomes
from helpers.recorder import ITERATION, record
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint import format as form
from lockstep.checkpoint import tensorfile
from lockstep.checkpoint.lineage import find, lineage
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.distributed import Runtime

pytestmark = pytest.mark.distributed


def train(directory, resume, settings):
    record(directory, resume=resume, **settings)


def train_until(directory, victim, moment):
    """Train, with each checkpoint written before the next iteration; one process kills itself during its third save."""
    save, write, link, counts = CheckpointManager.save, tensorfile.write_bytes, os.link, {"write": 0, "link": 0}

    def strike(now):
        if os.environ["RANK"] == str(victim) and now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def writing(path, parts, parity=None):
        counts["write"] += form.rows_of(path.name) is not None
        third = form.rows_of(path.name) is not None and counts["write"] == 3
        if third:
            strike("before a segment")
        digest = write(path, parts, parity)
        if third and moment == "half a segment":
            os.truncate(path, path.stat().st_size // 2)
        if third:
            strike("half a segment")
            strike("after a segment")
        return digest

    def linking(source, target):
        counts["link"] += counts["write"] == 3
        if counts["write"] == 3 and counts["link"] == 1:
            strike("before a link")
        link(source, target)
        if counts["write"] == 3 and counts["link"] == 1:
            strike("after a link")

    def save_and_wait(self, *arguments, **settings):
        save(self, *arguments, **settings)
        self.wait()

    CheckpointManager.save, tensorfile.write_bytes, os.link = save_and_wait, writing, linking
    record(directory)


def train_with_late_writer(directory):
    """Kill the main process; the writer thread of the other process contacts the store only after that."""
    mailbox = Runtime.kv_store

    def wait_then_open(self):
        if os.environ["RANK"] == "1" and threading.current_thread() is not threading.main_thread():
            time.sleep(3.0)
        return mailbox(self)

    Runtime.kv_store = wait_then_open
    train_until(directory, 0, "after a segment")


def run(directory, processes, resume=False, **settings):
    return outcomes(train, processes, str(directory), resume, settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    assert not errors(run(directory, 1))
    return hash_of(directory / "run")


@pytest.mark.parametrize(
    ("moment", "victim", "processes", "resumed_on"),
    [
        ("before a segment", 0, 1, 3),
        ("half a segment", 0, 1, 2),
        ("half a segment", 1, 2, 3),  # not the process that publishes
        ("after a segment", 0, 2, 1),
        ("before a link", 0, 1, 1),
        ("after a link", 0, 3, 2),
    ],
)
def test_resume_after_kill_during_segment_save_matches_undisturbed_run(
    tmp_path, undisturbed, moment, victim, processes, resumed_on
):
    killed = outcomes(train_until, processes, str(tmp_path), victim, moment)
    assert killed[victim].error == "ended by SIGKILL"
    checkpoints = tmp_path / "run" / "checkpoints"
    name, notes = find(checkpoints)
    assert (name.samples, notes) == (2 * ITERATION, [])
    assert list(checkpoints.glob(".*.partial"))
    assert not errors(run(tmp_path, resumed_on, resume=True))
    assert not list(checkpoints.glob(".*"))
    assert hash_of(tmp_path / "run") == undisturbed


def test_late_writer_fails_if_the_main_process_and_its_store_are_gone(tmp_path):
    killed, late = outcomes(train_with_late_writer, 2, str(tmp_path))  # Hung if it waits past the test limit
    assert killed.error == "ended by SIGKILL"
    assert late.error


def test_replay_resumed_on_other_process_counts_matches_undisturbed_run(tmp_path, undisturbed):
    for start, (processes, iterations) in enumerate([(3, 1), (1, 3), (2, 4), (4, 6)]):
        assert not errors(run(tmp_path, processes, resume=start > 0, total_samples=iterations * ITERATION))
    assert hash_of(tmp_path / "run") == undisturbed
    newest = tmp_path / "run" / "checkpoints" / str(lineage(tmp_path / "run" / "checkpoints")[0])
    files = [name for name in sorted(os.listdir(newest)) if form.rows_of(name)]
    lanes = {
        span: [name[7:16] for name in files if form.rows_of(name) == range(*span)] for span in ((12, 16), (20, 24))
    }
    # Rows 14 and 15 were written by two processes, the newest by four: each lane is read from the file that has it.
    assert lanes == {
        (12, 16): ["0000-0003", "0004-0007"],
        (20, 24): ["0000-0001", "0002-0003", "0004-0005", "0006-0007"],
    }
