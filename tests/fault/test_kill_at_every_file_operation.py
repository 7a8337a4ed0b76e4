"""SIGKILL at every file operation of a save: the run then resumes from an undamaged checkpoint with the same result.

`file_operations` counts the operations and kills the process at the k-th of them.
"""

import shutil
from pathlib import Path

import pytest
from file_operations import Operations
from run_helpers import SAMPLES, errors, trial, trial_that_finishes_each_save

from helpers.multiprocess import outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint.lineage import find
from lockstep.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.distributed

SETTINGS = {"run.eval_every": None, "run.keep_last": 2}
"""No evaluation, so no best checkpoint; few checkpoints kept, so that a save also deletes."""


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
    # The four files, their directory and the three logs are synced before the rename that publishes them.
    assert names[: names.index("os.rename")].count("fsync") == 8
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
