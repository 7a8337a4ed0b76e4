"""What a kill at an awkward moment leaves behind keeps no run from going on."""

import json
import shutil

import pytest
from runs import SAMPLES, errors, run, run_killed, trial

from lockstep.checkpoint.lineage import find, lineage
from lockstep.config import ConfigError
from lockstep.io.jsonl import METRICS, read_jsonl, truncate_after
from manifests import sealed
from processes import outcomes
from tiny import hash_of

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run killed in its last iteration, with checkpoints at one, two and three iterations; and its whole twin."""
    directory = tmp_path_factory.mktemp("stopped")
    assert not errors(run(directory, "whole", 2))
    assert "SIGKILL" in run_killed(directory, "run", 2, kill="1:learn:4")
    assert [name.samples for name in lineage(directory / "run" / "checkpoints")] == [3 * SAMPLES, 2 * SAMPLES, SAMPLES]
    return directory


@pytest.fixture
def checkpoints(stopped, tmp_path):
    """The checkpoints of a copy of that run, in `tmp_path / "run"`."""
    shutil.copytree(stopped / "run", tmp_path / "run")
    return tmp_path / "run" / "checkpoints"


def test_a_checkpoint_whose_deletion_a_kill_cut_short_is_deleted_the_next_time(stopped, checkpoints, tmp_path):
    oldest = lineage(checkpoints)[-1]
    (checkpoints / str(oldest) / "manifest.json").unlink()  # what is left of it when the kill strikes
    assert not errors(run(tmp_path, "run", 1, resume=True))
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")
    assert not (checkpoints / str(oldest)).exists()


def test_a_start_that_was_killed_as_it_claimed_its_generation_leaves_the_run_as_it_was(stopped, checkpoints, tmp_path):
    (checkpoints / "attempt-0002.json").touch()
    assert not errors(run(tmp_path, "run", 3, resume=True))
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")
    assert {name.generation for name in lineage(checkpoints)} == {1, 3}


def test_a_manifest_that_knows_of_too_few_lanes_is_damaged(stopped, checkpoints, tmp_path):
    newest = lineage(checkpoints)[0]
    path = checkpoints / str(newest) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["lanes-0004-0007.safetensors"]
    path.write_text(sealed(manifest))
    ended = run(tmp_path, "run", 1, resume=True)
    assert not errors(ended)
    assert f"Checkpoint {newest} is damaged" in ended[0].output
    assert "no file for lane 4" in ended[0].output
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_not_said_to_be_replaced(checkpoints):
    newest = lineage(checkpoints)[0]
    (checkpoints / str(newest) / "train_state.json").unlink()
    with pytest.raises(ConfigError, match=r"train_state\.json is missing") as refused:
        find(checkpoints, newest.samples)
    assert "the one before" not in str(refused.value)
    assert "No whole checkpoint is left" not in str(refused.value)  # there are two


def test_a_log_is_cut_back_in_one_step(checkpoints):
    path = checkpoints.parent / METRICS
    whole = path.read_text()
    with path.open() as reader:  # stands for a kill: whoever holds the old file finds all of it
        truncate_after(path, SAMPLES)
        assert reader.read() == whole
    assert '"samples": 256' in whole
    assert read_jsonl(path) == []


def test_a_process_that_dies_before_it_has_written_its_part_is_missed_within_the_timeout(stopped, tmp_path):
    """In the last save no collective follows that would show it: the main process stands at the store alone."""
    ended = outcomes(
        trial,
        2,
        str(tmp_path),
        "run",
        {"run.collective_timeout": 3.0},
        False,
        environment={"LOCKSTEP_INJECT_FAULT": "1:save:4"},
    )
    assert ended[1].error == "ended by SIGKILL"
    assert "the checkpoint could not be written: process 1 has said nothing for 3 s" in ended[0].error
    assert not errors(run(tmp_path, "run", 2, resume=True))
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")
