"""Directories of runs whose start failed."""

import json

import pytest

from lockstep.run_reservation import remove_if_unstarted


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    (path / "checkpoints").mkdir(parents=True)
    (path / "status.json").write_text(json.dumps({"state": "running", "job": "a"}))
    return path


def test_remove_if_unstarted_removes_directory_without_claim(run):
    remove_if_unstarted(run, "a")
    assert [*run.parent.iterdir()] == []


@pytest.mark.parametrize("kept", ["checkpoints/attempt-0001.json", "hang.txt"])
def test_remove_if_unstarted_keeps_claimed_run_and_hang_report(run, kept):
    (run / kept).touch()
    remove_if_unstarted(run, "a")
    assert (run / kept).exists()


def test_remove_if_unstarted_keeps_directory_of_another_job(run):
    remove_if_unstarted(run, "b")
    assert (run / "status.json").exists()
