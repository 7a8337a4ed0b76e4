"""Bad disks: full, read-only, forbidden, slow, not shared. A clear sentence each time, and never a wrong resume.

Disks are small ones in memory that the tests mount, which takes root. Where that is impossible, LOCKSTEP_SKIP_MOUNT=1
leaves these tests out.
"""

import ctypes
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import SAMPLES, errors, run, trial, trial_that_finishes_each_save

from lockstep.checkpoint import format, manager
from lockstep.checkpoint.lineage import lineage, list_checkpoints
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.distributed.runtime import Runtime
from processes import outcomes
from tiny import hash_of

pytestmark = pytest.mark.distributed


def mount(*words):
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    assert not done.returncode, (
        f"no disk can be mounted here ({done.stderr.strip()}): be root, or LOCKSTEP_SKIP_MOUNT=1"
    )


@pytest.fixture
def disk(tmp_path):
    """A disk of four megabytes."""
    if os.environ.get("LOCKSTEP_SKIP_MOUNT") == "1":
        pytest.skip("LOCKSTEP_SKIP_MOUNT=1")
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
    yield place
    subprocess.run(["umount", "-l", place], check=False)


def fill(directory):
    with (Path(directory) / "filler").open("wb", buffering=0) as file:
        size = 2**20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def free(directory):
    (Path(directory) / "filler").unlink()


def forbid(directory):
    mount("-o", "remount,ro", directory)


def permit(directory):
    mount("-o", "remount,rw", directory)


def lose_rights(_):
    os.seteuid(65534)


def regain_rights(_):
    os.seteuid(0)


TROUBLES = {
    "full": (fill, free, "No space left on device"),
    "read-only": (forbid, permit, "Read-only file system"),
    "forbidden": (lose_rights, regain_rights, "Permission denied"),
}


def train_in_trouble(directory, trouble, ends):
    """The second save meets a bad disk, and the third; before the last one it is mended, or not."""
    begin, end, _ = TROUBLES[trouble]
    saves, save = 0, CheckpointManager.save

    def troubled(self, *args, **settings):
        nonlocal saves
        if not settings.get("best"):
            saves += 1
            if self.runtime.is_main and saves == 2:
                begin(directory)
            if self.runtime.is_main and saves == 4 and ends:
                end(directory)
        self.runtime.all_reduce_any(ready=True)
        save(self, *args, **settings)

    CheckpointManager.save = troubled
    trial_that_finishes_each_save(directory, "run", {"run.eval_every": None}, False)


@pytest.fixture(scope="module")
def without_evaluation(tmp_path_factory):
    directory = tmp_path_factory.mktemp("without")
    assert not errors(outcomes(trial, 1, str(directory), "run", {"run.eval_every": None}, False))
    return hash_of(directory / "run")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_run_goes_on_without_saves_and_saves_again_when_it_can(disk, without_evaluation, trouble):
    ended = outcomes(train_in_trouble, 2, str(disk), trouble, True)
    assert not errors(ended)
    told = " ".join(ended[0].output.split())
    for samples in (2 * SAMPLES, 3 * SAMPLES):
        assert f"The checkpoint {samples:012d}-g0001 could not be written: process 0 on" in told
    assert TROUBLES[trouble][2] in told
    assert f"The checkpoint at {SAMPLES} samples stands; training goes on, and the next save tries again." in told
    assert [name.samples for name in list_checkpoints(disk / "run" / "checkpoints")] == [4 * SAMPLES, SAMPLES]
    assert not list((disk / "run" / "checkpoints").glob(".*.partial"))
    assert hash_of(disk / "run") == without_evaluation


@pytest.mark.parametrize("pages", range(4))
def test_a_disk_with_hardly_any_room_left_is_told_of_wherever_it_ends(disk, pages):
    assert not errors(run(disk, "run", 1))
    fill(disk)
    filler = disk / "filler"
    os.truncate(filler, filler.stat().st_size // 4096 * 4096 - 4096 * pages)
    assert errors(run(disk, "run", 1, resume=True)).startswith("ConfigError: ")


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_run_whose_last_save_fails_stops_every_process_and_resumes_from_what_stands(
    disk, without_evaluation, trouble
):
    _, end, words = TROUBLES[trouble]
    for outcome in outcomes(train_in_trouble, 2, str(disk), trouble, False):
        assert outcome.error.startswith("ConfigError: the last checkpoint could not be written: process 0 on")
        assert words in outcome.error
        assert f"The checkpoint at {SAMPLES} samples stands. Mend that, then go on: lockstep resume" in outcome.error
    refused = errors(run(disk, "run", 2, resume=True))
    assert "ConfigError" in refused
    # How far it comes depends on a page that a directory may have left.
    assert any(words in refused for words in ("cannot be written", "cannot be used", "could not be written"))
    end(disk)
    assert not errors(outcomes(trial, 2, str(disk), "run", {"run.eval_every": None}, True))
    assert hash_of(disk / "run") == without_evaluation


# -- slow --------------------------------------------------------------------------------------------------------------


def train_on_a_slow_disk(directory):
    """What happened in which order: the second save takes until an iteration has passed, and a while longer."""
    events, write, learn = [], format.write_tensors, Runtime.fault_point
    manager.SLOW_SECONDS = 0.2

    def slowly(path, tensors):
        second = f"{2 * SAMPLES:012d}" in str(path)
        if second:
            deadline = time.monotonic() + 30
            while "iteration 3" not in events and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(1)
        done = write(path, tensors)
        events.append("written") if second else None
        return done

    def passing(self, name):
        learn(self, name)
        if name == "copy":
            events.append(f"iteration {self.status.phase_counts[name]}")

    format.write_tensors, Runtime.fault_point = slowly, passing
    trial(directory, "run", {"run.eval_every": None}, False)
    return events


def test_a_slow_disk_holds_training_up_no_earlier_than_the_next_save_and_is_named(tmp_path, without_evaluation):
    (ended,) = outcomes(train_on_a_slow_disk, 1, str(tmp_path))
    assert not ended.error
    assert ended.value[:4] == ["iteration 1", "iteration 2", "iteration 3", "written"]
    assert "s for the save before this one: the disk is slow." in " ".join(ended.output.split())
    assert hash_of(tmp_path / "run") == without_evaluation


# -- a clock set back --------------------------------------------------------------------------------------------------


def train_with_the_clock_set_back(directory, resume):
    """Time runs backwards, an hour a look."""
    now = [1_000_000_000.0]

    def earlier():
        now[0] -= 3600
        return now[0]

    time.time = earlier
    trial(directory, "run", {}, resume)


def test_a_clock_that_is_set_back_changes_nothing(tmp_path, undisturbed):
    environment = {"LOCKSTEP_INJECT_FAULT": "0:learn:4"}
    ended = outcomes(train_with_the_clock_set_back, 1, str(tmp_path), False, environment=environment)
    assert "SIGKILL" in errors(ended)
    line = lineage(tmp_path / "run" / "checkpoints")
    for age, name in enumerate(line):  # the newest looks oldest
        for path in (tmp_path / "run" / "checkpoints" / str(name), tmp_path / "run" / "checkpoints"):
            os.utime(path, (age, age))
    assert not errors(outcomes(train_with_the_clock_set_back, 1, str(tmp_path), True))
    assert f'"{line[0]}"' in (tmp_path / "run" / "checkpoints" / "attempt-0002.json").read_text()
    assert hash_of(tmp_path / "run") == undisturbed


# -- a directory that one host does not see ----------------------------------------------------------------------------


@contextmanager
def a_view_of_ones_own(place):
    """From here on, this process sees an empty disk in that place, as another host would."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", place)
    yield


def train_where_process_two_sees_another_disk(directory, resume):
    if os.environ["RANK"] == "2":
        with a_view_of_ones_own(directory):
            trial(directory, "run", {}, resume)
    trial(directory, "run", {}, resume)


def test_a_run_directory_that_a_process_does_not_see_is_named_by_every_process(disk):
    for resume in (False, True):
        for outcome in outcomes(train_where_process_two_sees_another_disk, 3, str(disk), resume):
            assert outcome.error.startswith("ConfigError: process 2 on host ")
            assert f"does not see {disk}/run." in outcome.error
            assert "storage that all hosts share" in outcome.error
        assert not list((disk / "run").glob(".token-*"))
    assert not errors(run(disk, "run", 2, resume=True))
