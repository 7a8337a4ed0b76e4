"""Durable writes: directories and logs are synced before they are relied on; a failed sync affects no later save."""

import errno
import os
from pathlib import Path

import pytest

from helpers.tiny_recipes import ITERATION, hash_of, tiny
from lockstep.checkpoint import format as form
from lockstep.checkpoint import manager
from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.lineage import find, list_checkpoints
from lockstep.checkpoint.naming import CheckpointName
from lockstep.checkpoint.publishing import publish
from lockstep.io import jsonl
from lockstep.io.durable import make_directories
from lockstep.io.jsonl import append_jsonl, sync_lines, truncate_after
from lockstep.training_loop import train


@pytest.fixture
def synced(monkeypatch):
    """Record the synced paths in order."""
    paths, fsync = [], os.fsync

    def watched(descriptor):
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return paths


def test_make_directories_syncs_parents_of_new_directories(tmp_path, synced):
    make_directories(tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    make_directories(tmp_path / "a" / "b" / "c")
    assert not synced


def test_new_run_syncs_parent_directories(tmp_path, synced):
    train(tiny(tmp_path / "deep" / "runs", total_samples=ITERATION))
    assert {tmp_path, tmp_path / "deep", tmp_path / "deep" / "runs", tmp_path / "deep" / "runs" / "run"} <= set(synced)


def test_log_is_synced_before_checkpoint_is_published(tmp_path, synced, monkeypatch):
    order, move = [], os.rename

    def watched(source, target):
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
        order.append((synced.count(tmp_path / "run" / "metrics.jsonl"), lines))
        move(source, target)

    monkeypatch.setattr(os, "rename", watched)
    train(tiny(tmp_path, total_samples=3 * ITERATION))
    assert [syncs for syncs, _ in order] == [1, 2, 3]
    assert all(lines >= syncs for syncs, lines in order)


def test_log_sync_failure_only_warns(tmp_path, monkeypatch, caplog):
    fsync = os.fsync

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    append_jsonl(tmp_path / "metrics.jsonl", {"samples": 1})
    monkeypatch.setattr(os, "fsync", failing)
    sync_lines(tmp_path)
    assert "may miss lines after a power cut" in caplog.text


def test_truncated_log_is_synced_before_it_replaces_the_old_one(tmp_path, synced):
    for samples in (1, 2, 3):
        append_jsonl(tmp_path / "metrics.jsonl", {"samples": samples})
    truncate_after(tmp_path / "metrics.jsonl", 2)
    assert synced == [tmp_path / ".metrics.jsonl.partial"]
    assert [line["samples"] for line in jsonl.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_replace_text_syncs_file_and_directory(tmp_path, synced):
    form.replace_text(tmp_path / "latest", "one")
    assert synced[-1] == tmp_path
    assert len(synced) == 2


# ----------------------------------------------------------------------------------------------------------- publishing


def fail_once(monkeypatch, saves):
    """Make the sync of the checkpoint directory fail after the rename of the given save."""
    fsync_directory, seen = Disk.fsync_directory, []

    def failing(self, path):
        if path.name == "checkpoints":
            seen.append(path)
            if len(seen) == 1 + saves:  # the first sync belongs to the claim
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        fsync_directory(self, path)

    monkeypatch.setattr(Disk, "fsync_directory", failing)


def test_sync_error_after_publishing_does_not_affect_later_saves(tmp_path, monkeypatch, caplog):
    whole = train(tiny(tmp_path / "whole", total_samples=2 * ITERATION)).path
    fail_once(monkeypatch, 2)
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path  # the last save is repeated at the end
    assert "Input/output error" in caplog.text
    assert "not empty" not in caplog.text
    assert [name.samples for name in list_checkpoints(path / "checkpoints")] == [2 * ITERATION, ITERATION]
    assert hash_of(path) == hash_of(whole)


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Arguments of publish for a directory whose target name exists already."""
    monkeypatch.setattr(form, "verify", lambda directory, replay: (directory / "whole").exists() or _fail())
    fence, name = GenerationFence(tmp_path, main=True), CheckpointName(100, 1)
    fence.generation = 1
    for directory in ("partial", str(name)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "which").write_text(directory)
    return fence, tmp_path / "partial", name


def _fail():
    raise form.CorruptCheckpointError("not whole")


def test_publish_keeps_valid_checkpoint_of_earlier_attempt(tmp_path, attempt):
    (tmp_path / str(attempt[2]) / "whole").touch()
    publish(*attempt)
    assert (tmp_path / str(attempt[2]) / "which").read_text() == str(attempt[2])
    assert [path.name for path in tmp_path.iterdir()] == [str(attempt[2])]


def test_publish_replaces_damaged_checkpoint_of_same_name(tmp_path, attempt):
    publish(*attempt)
    assert (tmp_path / str(attempt[2]) / "which").read_text() == "partial"
    assert [path.name for path in tmp_path.iterdir()] == [str(attempt[2])]


def test_save_that_fails_before_publishing_leaves_no_files(tmp_path, monkeypatch, caplog):
    calls = []

    def failing(fence, partial, name):
        calls.append(name)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        publish(fence, partial, name)

    monkeypatch.setattr(manager, "publish", failing)
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path
    assert "Input/output error" in caplog.text
    assert find(path / "checkpoints")[0].samples == 2 * ITERATION
    assert not list((path / "checkpoints").glob(".*"))
