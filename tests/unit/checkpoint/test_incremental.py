"""Incremental checkpoints: appended rows are written once and linked later; hashes do not depend on segments."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch

from helpers.manifests import sealed
from helpers.recorder import ITERATION, LANES, record
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint import format as form
from lockstep.checkpoint import incremental
from lockstep.checkpoint.format import CorruptCheckpointError, hash_checkpoint, verify
from lockstep.checkpoint.incremental import IncrementalState
from lockstep.checkpoint.lineage import find, lineage
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.config import ConfigError
from lockstep.protocols import AppendOnlyTensor


def checkpoints(run):
    """Return the checkpoint directories of a run, oldest first."""
    return [run / "checkpoints" / str(name) for name in sorted(lineage(run / "checkpoints"))]


def spans(checkpoint):
    """Return the row ranges of the segments listed in the manifest."""
    held = [form.rows_of(name) for name in verify(checkpoint)["files"]]
    return sorted((rows.start, rows.stop) for rows in held if rows is not None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six iterations with a save after each; each adds four rows and ten are kept."""
    return record(tmp_path_factory.mktemp("whole"))


# --------------------------------------------------------------------------------------------------------------- saving


def test_save_writes_added_rows_and_links_existing_segments(whole):
    assert [spans(checkpoint) for checkpoint in checkpoints(whole)] == [
        [(0, 4)],
        [(0, 4), (4, 8)],
        [(0, 4), (4, 8), (8, 12)],  # rows 2 and 3 of the first segment are still in the buffer
        [(4, 8), (8, 12), (12, 16)],
        [(8, 12), (12, 16), (16, 20)],
        [(12, 16), (16, 20), (20, 24)],
    ]
    files = {}
    for checkpoint in checkpoints(whole):
        for path in checkpoint.glob("replay-*"):
            files.setdefault(path.name, set()).add(path.stat().st_ino)
    assert all(len(inodes) == 1 for inodes in files.values())  # one file with several hard links
    assert len(files) == 12  # each segment and its parity


def test_restored_lane_has_only_rows_still_in_buffer(whole):
    newest = checkpoints(whole)[-1]
    values, files = form.read_values(newest), verify(newest)["files"]
    assert values["rows"] == [14, 24]
    lane = form.strip_prefix(form.read_lane(newest, 3, files, values["rows"]), "algorithm")
    assert lane["replay.action"].shape == (10, 2)
    assert int(lane["replay.written"]) == 24


def test_deleting_older_checkpoints_keeps_newest_intact(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    *older, newest = checkpoints(tmp_path / "run")
    before = hash_checkpoint(newest)
    for checkpoint in older:
        shutil.rmtree(checkpoint)
    assert hash_checkpoint(newest) == before


def test_hash_is_independent_of_save_interval(whole, tmp_path):
    for name, every in (("seldom", 3 * ITERATION), ("once", 6 * ITERATION), ("oddly", 4 * ITERATION)):
        assert hash_of(record(tmp_path, name, save_every=every)) == hash_of(whole)


def test_hash_depends_on_every_row_in_buffer(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    newest = checkpoints(tmp_path / "run")[-1]
    before = hash_checkpoint(newest)
    (name,) = [name for name in verify(newest)["files"] if form.rows_of(name) == range(12, 16)]
    for row, matters in ((1, False), (2, True)):  # rows 12 and 13 of that segment are no longer in the buffer
        tensors = form.read_tensor_file(newest / name, None)
        tensors["lane-0005.algorithm.replay.action"][row] += 1
        change(newest, name, tensors)
        assert (hash_checkpoint(newest) != before) == matters


def change(checkpoint, name, tensors):
    """Replace the tensors of a file and update its hash."""
    (checkpoint / name).unlink()  # a hard link: other checkpoints keep their file
    manifest = json.loads((checkpoint / form.MANIFEST).read_text())
    manifest["files"][name] = form.write_tensors(checkpoint / name, tensors)
    (checkpoint / form.MANIFEST).write_text(sealed(manifest))


def test_checkpoint_before_first_row_has_an_empty_segment(tmp_path):
    grown = {"lane-0000.a": AppendOnlyTensor(0, 0, lambda start, stop: torch.zeros(0, 2))}
    taken = IncrementalState()
    taken.stage(grown, range(1))
    name, parity = taken.write(tmp_path)
    assert parity == form.parity_file(name)
    assert form.rows_of(name) == range(0)
    assert form.read_rows(tmp_path, 0, [name], [0, 0], None)["a"].shape == (0, 2)


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_resume_links_existing_segments_and_matches_uninterrupted_run(whole, tmp_path, iterations):
    path = record(tmp_path, total_samples=iterations * ITERATION)
    before = spans(checkpoints(path)[-1])
    record(tmp_path, resume=True)
    assert hash_of(path) == hash_of(whole)
    first = checkpoints(path)[iterations]  # the first save after the resume
    assert set(spans(first)) - set(before) == {(4 * iterations, 4 * iterations + 4)}


def test_merging_segments_does_not_change_hash(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(incremental, "MERGE", 3)
    path = record(tmp_path)
    assert hash_of(path) == hash_of(whole)
    assert [spans(checkpoint) for checkpoint in checkpoints(path)] == [
        [(0, 4)],
        [(0, 4), (4, 8)],
        [(2, 12)],  # all remaining rows in one segment
        [(2, 12), (12, 16)],
        [(2, 12), (12, 16), (16, 20)],
        [(14, 24)],
    ]


def test_segments_are_copied_where_hard_links_are_unsupported(whole, tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    path = record(tmp_path)
    assert hash_of(path) == hash_of(whole)
    assert all(file.stat().st_nlink == 1 for file in path.rglob("replay-*"))


def test_save_with_missing_segments_fails_and_next_rewrites_all(whole, tmp_path, monkeypatch, caplog):
    save = CheckpointManager.save

    def losing(self, algorithm, task, clock, **more):
        save(self, algorithm, task, clock, **more)
        self.wait()
        if clock.iteration == 2:
            for path in (self.directory / str(self._last_complete)).glob("replay-*"):
                path.unlink()

    monkeypatch.setattr(CheckpointManager, "save", losing)
    with caplog.at_level(logging.WARNING):
        path = record(tmp_path)
    assert "could not be written" in caplog.text
    assert "No such file" in caplog.text
    samples = [name.samples for name in sorted(lineage(path / "checkpoints"))]
    assert samples == [ITERATION * n for n in (1, 2, 4, 5, 6)]
    assert spans(checkpoints(path)[2]) == [(6, 16)]
    assert hash_of(path) == hash_of(whole)


def test_save_on_full_disk_leaves_rows_to_next_save(whole, tmp_path, monkeypatch):
    write = incremental.write_tensor_file

    def full(path, tensors, parity):
        if "replay-" in path.name and "-000000000012" in path.name.removesuffix(".safetensors")[-13:]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors, parity)

    monkeypatch.setattr(incremental, "write_tensor_file", full)
    path = record(tmp_path)
    assert [spans(checkpoint) for checkpoint in checkpoints(path)][2] == [(4, 8), (8, 16)]
    assert hash_of(path) == hash_of(whole)


def test_append_only_tensors_of_unequal_length_are_rejected():
    grown = {
        name: AppendOnlyTensor(0, stop, lambda start, stop: torch.zeros(stop - start))
        for name, stop in (("a", 3), ("b", 4))
    }
    with pytest.raises(ValueError, match="must grow in step"):
        IncrementalState().stage(grown, range(1))


# ----------------------------------------------------------------------------------------------------------- corruption


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of the run without hard links, its newest checkpoint and one of its segments."""
    path = shutil.copytree(whole, tmp_path / "run")
    newest = checkpoints(path)[-1]
    return path, newest, sorted(newest.glob("replay-*.safetensors"))[1]


def test_missing_segment_is_corrupt_and_previous_checkpoint_is_used(damaged):
    path, newest, segment = damaged
    segment.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{segment.name} is missing"):
        verify(newest)
    assert find(path / "checkpoints")[0].samples == 5 * ITERATION


def test_changed_byte_in_segment_is_corrupt(damaged):
    _, newest, segment = damaged
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    segment.with_suffix(".parity").unlink()  # the parity file would repair it
    with pytest.raises(CorruptCheckpointError, match="its SHA-256 differs"):
        verify(newest)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_manifest_without_segment_is_corrupt(damaged, missing):
    _, newest, _ = damaged
    manifest = json.loads((newest / form.MANIFEST).read_text())
    manifest["files"].pop(sorted(name for name in manifest["files"] if form.rows_of(name))[missing])
    (newest / form.MANIFEST).write_text(sealed(manifest))
    with pytest.raises(CorruptCheckpointError, match="lists no files for rows 14 to 24 of lane 0"):
        verify(newest)


@pytest.mark.parametrize("rows", [[14], [24, 14], [-1, 24], "14", [14, 24.0], None, [14, 25], [11, 24], [True, 24]])
def test_values_with_invalid_rows_are_corrupt(damaged, rows):
    _, newest, _ = damaged
    values = json.loads((newest / form.VALUES).read_text()) | {"rows": rows}
    manifest = json.loads((newest / form.MANIFEST).read_text())
    manifest["files"][form.VALUES] = form.write_json(newest / form.VALUES, values)
    (newest / form.MANIFEST).write_text(sealed(manifest))
    with pytest.raises(CorruptCheckpointError, match="rows"):
        verify(newest)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda x: x.update({k: v[:-1] for k, v in x.items()}), "does not hold 4 rows"),
        (lambda x: x.update({"lane-0003.algorithm.x": torch.tensor(1.0)}), "has other tensors than"),
        (
            lambda x: x.update({k: v[:, :1] for k, v in x.items()}),
            "was saved as",
        ),
        (lambda x: x.update({"lane-0003.algorithm.x": torch.ones(4)}), "other tensors than"),
        (lambda x: x.update({k: v.double() for k, v in x.items()}), "was saved as torch.float64"),
        (lambda x: [x.pop(k) for k in list(x) if "action" in k], "has other tensors than"),
    ],
)
def test_resume_with_mismatched_segment_is_rejected(damaged, edit, sentence):
    path, newest, segment = damaged
    tensors = form.read_tensor_file(segment, None)
    edit(tensors)
    change(newest, segment.name, tensors)
    with pytest.raises(ConfigError) as refused:
        record(path.parent, resume=True, total_samples=7 * ITERATION)
    assert sentence in str(refused.value)


def test_lane_without_segment_is_corrupt(whole):
    newest = checkpoints(whole)[-1]
    files = verify(newest)["files"]
    with pytest.raises(CorruptCheckpointError, match=f"lists no files for rows 14 to 24 of lane {LANES}"):
        form.segments(newest, files, LANES, [14, 24])
