"""SIGKILL at every file operation of a save: the run then resumes from an undamaged checkpoint with the same result.

A Python audit hook sees every file that is opened, created, renamed or removed. The rest (fsync, and a partly written
file) is wrapped here. The process is killed at the k-th of these operations.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from run_helpers import SAMPLES, errors, trial, trial_that_finishes_each_save

from helpers.multiprocess import outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint import format as form
from lockstep.checkpoint import tensorfile
from lockstep.checkpoint.lineage import find
from lockstep.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.distributed

EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "os.listdir",
    "os.scandir",
}
SETTINGS = {"run.eval_every": None, "run.keep_last": 2}
"""No evaluation, so no best checkpoint; few checkpoints kept, so that a save also deletes."""


class Operations:
    """Counts the file operations of one save, and kills this process at operation `at`."""

    def __init__(self, directory: str, at: int) -> None:
        self.directory, self.at, self.active = directory, at, False
        self.names: list[str] = []

    def pass_by(self, name: str) -> None:
        if self.active:
            self.names.append(name)
            if len(self.names) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple) -> None:
        if self.active and event in EVENTS and self.directory in _place(event, arguments):
            self.pass_by(event)

    def wrap(self) -> None:
        fsync, write = os.fsync, tensorfile.write_bytes

        def watched_fsync(descriptor):
            self.pass_by("fsync")
            fsync(descriptor)

        def watched_write(path, parts, parity=None):
            digest = write(path, parts, parity)
            if len(self.names) + 1 == self.at and self.active:
                os.truncate(path, path.stat().st_size // 2)  # a kill while the file is being written
            self.pass_by("half a file")
            return digest

        os.fsync, form.write_bytes, tensorfile.write_bytes = watched_fsync, watched_write, watched_write
        sys.addaudithook(self.audit)


def _place(event: str, arguments: tuple) -> str:
    """Return the path of an operation, also if it identifies its directory by a descriptor."""
    path, rest = arguments[0], arguments[1:]
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    if event in ("os.remove", "os.rmdir") and rest[0] >= 0:
        return os.path.join(os.readlink(f"/proc/self/fd/{rest[0]}"), os.fsdecode(path))
    return os.fsdecode(path)


def save_under_watch(directory, at):
    """Resume a run and watch the save after its next iteration; return the save's operations if not killed."""
    operations = Operations(str(Path(directory) / "run" / "checkpoints"), at)
    operations.wrap()
    save, saves = CheckpointManager.save, []

    def watched(self, *args, **settings):
        saves.append(1)
        operations.active = len(saves) == 1
        save(self, *args, **settings)
        self.wait()
        operations.active = False

    CheckpointManager.save = watched
    trial(directory, "run", SETTINGS, True)
    return operations.names


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run killed in its third iteration, with a checkpoint per iteration, and the hash of the uninterrupted run."""
    directory = tmp_path_factory.mktemp("stopped")
    assert not errors(outcomes(trial, 1, str(directory), "whole", SETTINGS, False))
    environment = {"LOCKSTEP_INJECT_FAULT": "0:learn:3"}
    killed = outcomes(trial_that_finishes_each_save, 1, str(directory), "run", SETTINGS, False, environment=environment)
    assert "SIGKILL" in errors(killed)
    return directory / "run", hash_of(directory / "whole")


def files_of(directory):
    """Return the names and sizes of all files."""
    return tuple(sorted((str(path.relative_to(directory)), path.stat().st_size) for path in directory.rglob("*")))


def test_kill_at_every_file_operation_of_a_save_keeps_a_valid_checkpoint(tmp_path, stopped):
    original, wanted = stopped
    shutil.copytree(original, tmp_path / "0" / "run")
    (counted,) = outcomes(save_under_watch, 1, str(tmp_path / "0"), 0)
    names = counted.value
    # The operations of a save, so that the test fails if the hook misses one.
    assert {"os.mkdir", "open", "fsync", "os.rename", "shutil.rmtree", "os.rmdir", "os.remove"} <= set(names)
    assert (names.count("half a file"), names.count("os.remove")) == (4, 5)
    # The four files, their directory and the two logs are synced before the rename that publishes them.
    assert names[: names.index("os.rename")].count("fsync") == 7
    looks = ("os.scandir", "os.listdir")
    before = [name for name in names[: names.index("os.rename")] if name not in looks]
    assert before[-1] == "fsync"
    found, resumed_from = [], set()
    for at in range(1, len(names) + 1):
        place = tmp_path / str(at)
        shutil.copytree(original, place / "run")
        (killed,) = outcomes(save_under_watch, 1, str(place), at)
        assert killed.error == "ended by SIGKILL", f"operation {at} of {len(names)}, {names[at - 1]}"
        name, notes = find(place / "run" / "checkpoints")
        found.append(name.samples)
        assert not notes, f"a damaged checkpoint was published: {notes}"
        left = files_of(place / "run" / "checkpoints")
        if left not in resumed_from:  # some operations, such as listing and fsync, change no files
            resumed_from.add(left)
            (resumed,) = outcomes(trial, 1, str(place), "run", SETTINGS, True)
            assert not resumed.error, f"after operation {at}, {names[at - 1]}: {resumed.error}"
            assert hash_of(place / "run") == wanted, f"after operation {at}, {names[at - 1]}"
            assert not list((place / "run" / "checkpoints").glob(".*"))
        shutil.rmtree(place)
    assert len(resumed_from) > len(names) // 3
    published = names.index("os.rename") + 1
    assert found == [2 * SAMPLES] * published + [3 * SAMPLES] * (len(names) - published)
