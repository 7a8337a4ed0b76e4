"""Runs with replay: killed in the midst of writing or linking segments, and restored on other numbers of processes."""

import os
import signal
import threading
import time

import pytest
from runs import errors

from lockstep.checkpoint import format as form
from lockstep.checkpoint import tensorfile
from lockstep.checkpoint.lineage import find, lineage
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.distributed import Runtime
from processes import outcomes
from recorder import ITERATION, record
from tiny import hash_of

pytestmark = pytest.mark.distributed


def train(directory, resume, settings):
    record(directory, resume=resume, **settings)


def train_until(directory, victim, moment):
    """Train, every save on disk before the next iteration; at its third save a process kills itself at some moment."""
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


def train_and_come_late(directory):
    """The same; the main process dies, and the writer of the other one looks for it only then."""
    mailbox = Runtime.kv_store

    def come_late(self):
        if os.environ["RANK"] == "1" and threading.current_thread() is not threading.main_thread():
            time.sleep(3.0)
        return mailbox(self)

    Runtime.kv_store = come_late
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
        ("half a segment", 1, 2, 3),  # another process than the one that publishes
        ("after a segment", 0, 2, 1),
        ("before a link", 0, 1, 1),
        ("after a link", 0, 3, 2),
    ],
)
def test_a_run_killed_while_it_saves_segments_resumes_as_if_it_had_not_been(
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


def test_a_writer_that_comes_late_does_not_wait_for_a_store_that_is_gone(tmp_path):
    killed, late = outcomes(train_and_come_late, 2, str(tmp_path))  # Hung, if it waited for longer than any test may
    assert killed.error == "ended by SIGKILL"
    assert late.error


def test_replay_is_the_same_on_any_number_of_processes_from_one_start_to_the_next(tmp_path, undisturbed):
    for start, (processes, iterations) in enumerate([(3, 1), (1, 3), (2, 4), (4, 6)]):
        assert not errors(run(tmp_path, processes, resume=start > 0, total_samples=iterations * ITERATION))
    assert hash_of(tmp_path / "run") == undisturbed
    newest = tmp_path / "run" / "checkpoints" / str(lineage(tmp_path / "run" / "checkpoints")[0])
    files = [name for name in sorted(os.listdir(newest)) if form.rows_of(name)]
    lanes = {
        span: [name[7:16] for name in files if form.rows_of(name) == range(*span)] for span in ((12, 16), (20, 24))
    }
    # Rows 14 and 15 were written by two processes, the newest by four: each lane is read from whichever file holds it.
    assert lanes == {
        (12, 16): ["0000-0003", "0004-0007"],
        (20, 24): ["0000-0001", "0002-0003", "0004-0005", "0006-0007"],
    }
