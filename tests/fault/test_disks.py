"""Disk faults: full, read-only, no permission, slow, not shared. Each gives a clear message and never a wrong resume.

The tests mount small tmpfs disks, which needs root. LOCKSTEP_SKIP_MOUNT=1 skips these tests.
"""

import ctypes
import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_helpers import SAMPLES, errors, run, trial, trial_that_finishes_each_save

from helpers.multiprocess import outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint import format, manager
from lockstep.checkpoint.lineage import lineage, list_checkpoints
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.distributed.runtime import Runtime

pytestmark = pytest.mark.distributed


def mount(*words):
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    assert not done.returncode, (
        f"cannot mount a disk ({done.stderr.strip()}): run as root, or set LOCKSTEP_SKIP_MOUNT=1"
    )


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MB."""
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
    """Train with a disk fault during the second and third save; `ends`: the fault is removed before the last save."""
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
def test_training_continues_during_disk_fault_and_saves_after_it(disk, without_evaluation, trouble):
    ended = outcomes(train_in_trouble, 2, str(disk), trouble, True)
    assert not errors(ended)
    told = " ".join(ended[0].output.split())
    for samples in (2 * SAMPLES, 3 * SAMPLES):
        assert f"The checkpoint {samples:012d}-g0001 could not be written: process 0 on" in told
    assert TROUBLES[trouble][2] in told
    assert f"The checkpoint at {SAMPLES} samples is kept. Training continues, and the next save tries again." in told
    assert [name.samples for name in list_checkpoints(disk / "run" / "checkpoints")] == [4 * SAMPLES, SAMPLES]
    assert not list((disk / "run" / "checkpoints").glob(".*.partial"))
    assert hash_of(disk / "run") == without_evaluation


@pytest.mark.parametrize("pages", [0, 1, *(pytest.param(pages, marks=pytest.mark.slow) for pages in (2, 3))])
def test_resume_on_nearly_full_disk_raises_config_error(disk, pages):
    assert not errors(run(disk, "run", 1))
    fill(disk)
    filler = disk / "filler"
    os.truncate(filler, filler.stat().st_size // 4096 * 4096 - 4096 * pages)
    assert errors(run(disk, "run", 1, resume=True)).startswith("ConfigError: ")


@pytest.mark.parametrize("trouble", ["full", pytest.param("read-only", marks=pytest.mark.slow)])
def test_failed_last_save_stops_all_processes_and_resumes_from_kept_one(disk, without_evaluation, trouble):
    _, end, words = TROUBLES[trouble]
    for outcome in outcomes(train_in_trouble, 2, str(disk), trouble, False):
        assert outcome.error.startswith("ConfigError: the last checkpoint could not be written: process 0 on")
        assert words in outcome.error
        assert f"The checkpoint at {SAMPLES} samples is kept. Fix that, then run: lockstep resume" in outcome.error
    refused = errors(run(disk, "run", 2, resume=True))
    assert "ConfigError" in refused
    # Where it fails depends on whether a directory has a free page left.
    assert any(words in refused for words in ("cannot be written", "cannot be used", "could not be written"))
    end(disk)
    assert not errors(outcomes(trial, 2, str(disk), "run", {"run.eval_every": None}, True))
    assert hash_of(disk / "run") == without_evaluation


# -- slow --------------------------------------------------------------------------------------------------------------


def train_on_a_slow_disk(directory):
    """Return the order of events when the second save takes longer than an iteration."""
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


def test_slow_disk_delays_training_only_at_the_next_save_and_is_logged(tmp_path, without_evaluation):
    (ended,) = outcomes(train_on_a_slow_disk, 1, str(tmp_path))
    assert not ended.error
    assert ended.value[:4] == ["iteration 1", "iteration 2", "iteration 3", "written"]
    assert "s for the previous save: the storage is slow." in " ".join(ended.output.split())
    assert hash_of(tmp_path / "run") == without_evaluation


# -- system clock set back ---------------------------------------------------------------------------------------------


def train_with_the_clock_set_back(directory, resume):
    """Train while `time.time` goes back one hour per call."""
    now = [1_000_000_000.0]

    def earlier():
        now[0] -= 3600
        return now[0]

    time.time = earlier
    trial(directory, "run", {}, resume)


def test_clock_set_back_does_not_change_resume_or_result(tmp_path, undisturbed):
    environment = {"LOCKSTEP_INJECT_FAULT": "0:learn:4"}
    ended = outcomes(train_with_the_clock_set_back, 1, str(tmp_path), False, environment=environment)
    assert "SIGKILL" in errors(ended)
    line = lineage(tmp_path / "run" / "checkpoints")
    for age, name in enumerate(line):  # the newest has the oldest mtime
        for path in (tmp_path / "run" / "checkpoints" / str(name), tmp_path / "run" / "checkpoints"):
            os.utime(path, (age, age))
    assert not errors(outcomes(train_with_the_clock_set_back, 1, str(tmp_path), True))
    assert f'"{line[0]}"' in (tmp_path / "run" / "checkpoints" / "attempt-0002.json").read_text()
    assert hash_of(tmp_path / "run") == undisturbed


# -- directory not shared with one host --------------------------------------------------------------------------------


@contextmanager
def private_mount(place):
    """Mount an empty disk that only this process sees, as on another host."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", place)
    yield


def train_where_process_two_sees_another_disk(directory, resume):
    if os.environ["RANK"] == "2":
        with private_mount(directory):
            trial(directory, "run", {}, resume)
    trial(directory, "run", {}, resume)


def test_unshared_run_directory_is_reported_on_every_process(disk):
    for resume in (False, True):
        for outcome in outcomes(train_where_process_two_sees_another_disk, 3, str(disk), resume):
            assert outcome.error.startswith("ConfigError: process 2 on host ")
            assert f"does not see {disk}/run." in outcome.error
            assert "storage shared by all hosts" in outcome.error
        assert not list((disk / "run").glob(".token-*"))
    assert not errors(run(disk, "run", 2, resume=True))
