"""Files left behind by a kill do not prevent a resume."""

import json
import shutil

import pytest
from run_helpers import SAMPLES, errors, run, run_killed, trial

from helpers.manifests import sealed
from helpers.multiprocess import outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint.lineage import find, lineage
from lockstep.config import ConfigError
from lockstep.io.jsonl import METRICS, read_jsonl, truncate_after

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run killed in its last iteration, with checkpoints at iterations 1, 2 and 3, and an uninterrupted run."""
    directory = tmp_path_factory.mktemp("stopped")
    assert not errors(run(directory, "whole", 2))
    assert "SIGKILL" in run_killed(directory, "run", 2, kill="1:learn:4")
    assert [name.samples for name in lineage(directory / "run" / "checkpoints")] == [3 * SAMPLES, 2 * SAMPLES, SAMPLES]
    return directory


@pytest.fixture
def checkpoints(stopped, tmp_path):
    """The checkpoints directory of a copy of that run in `tmp_path / "run"`."""
    shutil.copytree(stopped / "run", tmp_path / "run")
    return tmp_path / "run" / "checkpoints"


def test_partly_deleted_checkpoint_is_deleted_on_resume(stopped, checkpoints, tmp_path):
    oldest = lineage(checkpoints)[-1]
    (checkpoints / str(oldest) / "manifest.json").unlink()  # a kill during deletion leaves the other files
    assert not errors(run(tmp_path, "run", 1, resume=True))
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")
    assert not (checkpoints / str(oldest)).exists()


def test_empty_claim_of_a_killed_start_does_not_change_the_run(stopped, checkpoints, tmp_path):
    (checkpoints / "attempt-0002.json").touch()
    assert not errors(run(tmp_path, "run", 3, resume=True))
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")
    assert {name.generation for name in lineage(checkpoints)} == {1, 3}


def test_manifest_with_missing_lanes_is_damaged(stopped, checkpoints, tmp_path):
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


def test_find_damaged_checkpoint_by_samples_reports_no_replacement(checkpoints):
    newest = lineage(checkpoints)[0]
    (checkpoints / str(newest) / "train_state.json").unlink()
    with pytest.raises(ConfigError, match=r"train_state\.json is missing") as refused:
        find(checkpoints, newest.samples)
    assert "the one before" not in str(refused.value)
    assert "No undamaged checkpoint is left" not in str(refused.value)  # there are two


def test_truncate_after_replaces_the_log_atomically(checkpoints):
    path = checkpoints.parent / METRICS
    whole = path.read_text()
    with path.open() as reader:  # an open descriptor still sees the whole old file, as after a kill
        truncate_after(path, SAMPLES)
        assert reader.read() == whole
    assert '"samples": 256' in whole
    assert read_jsonl(path) == []


def test_last_save_times_out_if_a_process_dies_before_writing(stopped, tmp_path):
    """No collective follows the last save, so only the main process's wait at the store can detect the dead process."""
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
    assert "the checkpoint could not be written: process 1 has sent no heartbeat for 3 s" in ended[0].error
    assert not errors(run(tmp_path, "run", 2, resume=True))
    assert hash_of(tmp_path / "run") == hash_of(stopped / "whole")
