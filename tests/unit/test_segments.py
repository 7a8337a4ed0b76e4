"""What grows is written once and linked from then on; a checkpoint is whole all the same, and its hash sees no cuts."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch

from lockstep.checkpoint import format as form
from lockstep.checkpoint import incremental
from lockstep.checkpoint.format import CorruptCheckpointError, hash_checkpoint, verify
from lockstep.checkpoint.incremental import IncrementalState
from lockstep.checkpoint.lineage import find, lineage
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.config import ConfigError
from lockstep.protocols import AppendOnlyTensor
from manifests import sealed
from recorder import ITERATION, LANES, record
from tiny import hash_of


def checkpoints(run):
    """The directories of a run's checkpoints, oldest first."""
    return [run / "checkpoints" / str(name) for name in sorted(lineage(run / "checkpoints"))]


def spans(checkpoint):
    """The rows each segment of a checkpoint holds, as its manifest lists them."""
    held = [form.rows_of(name) for name in verify(checkpoint)["files"]]
    return sorted((rows.start, rows.stop) for rows in held if rows is not None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six iterations that saved after each: four rows came each time, and ten are kept."""
    return record(tmp_path_factory.mktemp("whole"))


# -------------------------------------------------------------------------------------------------------- what is saved


def test_a_save_writes_what_was_added_and_links_what_is_still_there(whole):
    assert [spans(checkpoint) for checkpoint in checkpoints(whole)] == [
        [(0, 4)],
        [(0, 4), (4, 8)],
        [(0, 4), (4, 8), (8, 12)],  # of the first, rows 2 and 3 are still there
        [(4, 8), (8, 12), (12, 16)],
        [(8, 12), (12, 16), (16, 20)],
        [(12, 16), (16, 20), (20, 24)],
    ]
    files = {}
    for checkpoint in checkpoints(whole):
        for path in checkpoint.glob("replay-*"):
            files.setdefault(path.name, set()).add(path.stat().st_ino)
    assert all(len(inodes) == 1 for inodes in files.values())  # one file each, under several names
    assert len(files) == 12  # each segment and its parity


def test_a_lane_is_restored_with_the_rows_that_are_still_there(whole):
    newest = checkpoints(whole)[-1]
    values, files = form.read_values(newest), verify(newest)["files"]
    assert values["rows"] == [14, 24]
    lane = form.strip_prefix(form.read_lane(newest, 3, files, values["rows"]), "algorithm")
    assert lane["replay.action"].shape == (10, 2)
    assert int(lane["replay.written"]) == 24


def test_deleting_a_checkpoint_takes_nothing_from_the_others(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    *older, newest = checkpoints(tmp_path / "run")
    before = hash_checkpoint(newest)
    for checkpoint in older:
        shutil.rmtree(checkpoint)
    assert hash_checkpoint(newest) == before


def test_the_hash_does_not_depend_on_how_often_was_saved(whole, tmp_path):
    for name, every in (("seldom", 3 * ITERATION), ("once", 6 * ITERATION), ("oddly", 4 * ITERATION)):
        assert hash_of(record(tmp_path, name, save_every=every)) == hash_of(whole)


def test_the_hash_depends_on_every_row(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    newest = checkpoints(tmp_path / "run")[-1]
    before = hash_checkpoint(newest)
    (name,) = [name for name in verify(newest)["files"] if form.rows_of(name) == range(12, 16)]
    for row, matters in ((1, False), (2, True)):  # rows 12 and 13 of that segment were forgotten
        tensors = form.read_tensor_file(newest / name, None)
        tensors["lane-0005.algorithm.replay.action"][row] += 1
        change(newest, name, tensors)
        assert (hash_checkpoint(newest) != before) == matters


def change(checkpoint, name, tensors):
    """Put other tensors into a file, under the right hash."""
    (checkpoint / name).unlink()  # a link: the other checkpoints keep what they have
    manifest = json.loads((checkpoint / form.MANIFEST).read_text())
    manifest["files"][name] = form.write_tensors(checkpoint / name, tensors)
    (checkpoint / form.MANIFEST).write_text(sealed(manifest))


def test_before_anything_has_grown_a_checkpoint_says_what_will(tmp_path):
    grown = {"lane-0000.a": AppendOnlyTensor(0, 0, lambda start, stop: torch.zeros(0, 2))}
    taken = IncrementalState()
    taken.stage(grown, range(1))
    name, parity = taken.write(tmp_path)
    assert parity == form.parity_file(name)
    assert form.rows_of(name) == range(0)
    assert form._read_rows(tmp_path, 0, [name], [0, 0])["a"].shape == (0, 2)


# ------------------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_a_resumed_run_links_what_the_one_before_it_wrote_and_is_the_same_run(whole, tmp_path, iterations):
    path = record(tmp_path, total_samples=iterations * ITERATION)
    before = spans(checkpoints(path)[-1])
    record(tmp_path, resume=True)
    assert hash_of(path) == hash_of(whole)
    first = checkpoints(path)[iterations]  # the first save of the second start
    assert set(spans(first)) - set(before) == {(4 * iterations, 4 * iterations + 4)}


def test_segments_are_merged_now_and_then_and_the_run_stays_the_same(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(incremental, "MERGE", 3)
    path = record(tmp_path)
    assert hash_of(path) == hash_of(whole)
    assert [spans(checkpoint) for checkpoint in checkpoints(path)] == [
        [(0, 4)],
        [(0, 4), (4, 8)],
        [(2, 12)],  # all that is still there, as one
        [(2, 12), (12, 16)],
        [(2, 12), (12, 16), (16, 20)],
        [(14, 24)],
    ]


def test_where_the_disk_has_no_links_files_are_copied(whole, tmp_path, monkeypatch):
    def refused(source, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    path = record(tmp_path)
    assert hash_of(path) == hash_of(whole)
    assert all(file.stat().st_nlink == 1 for file in path.rglob("replay-*"))


def test_a_save_that_finds_nothing_to_link_is_given_up_and_the_next_writes_all_anew(
    whole, tmp_path, monkeypatch, caplog
):
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


def test_a_save_that_the_disk_does_not_take_leaves_what_is_to_be_written_to_the_next(whole, tmp_path, monkeypatch):
    write = incremental.write_tensor_file

    def full(path, tensors, parity):
        if "replay-" in path.name and "-000000000012" in path.name.removesuffix(".safetensors")[-13:]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors, parity)

    monkeypatch.setattr(incremental, "write_tensor_file", full)
    path = record(tmp_path)
    assert [spans(checkpoint) for checkpoint in checkpoints(path)][2] == [(4, 8), (8, 16)]
    assert hash_of(path) == hash_of(whole)


def test_rows_that_do_not_grow_in_step_are_refused():
    grown = {
        name: AppendOnlyTensor(0, stop, lambda start, stop: torch.zeros(stop - start))
        for name, stop in (("a", 3), ("b", 4))
    }
    with pytest.raises(ValueError, match="must grow in step"):
        IncrementalState().stage(grown, range(1))


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of the run without links in it, its newest checkpoint, and one of its segments."""
    path = shutil.copytree(whole, tmp_path / "run")
    newest = checkpoints(path)[-1]
    return path, newest, sorted(newest.glob("replay-*.safetensors"))[1]


def test_a_missing_segment_is_damage_and_the_checkpoint_before_is_used(damaged):
    path, newest, segment = damaged
    segment.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{segment.name} is missing"):
        verify(newest)
    assert find(path / "checkpoints")[0].samples == 5 * ITERATION


def test_a_changed_byte_in_a_segment_is_damage(damaged):
    _, newest, segment = damaged
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    segment.with_suffix(".parity").unlink()  # which would repair it
    with pytest.raises(CorruptCheckpointError, match="its SHA-256 differs"):
        verify(newest)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_manifest_that_leaves_a_segment_out_is_damage(damaged, missing):
    _, newest, _ = damaged
    manifest = json.loads((newest / form.MANIFEST).read_text())
    manifest["files"].pop(sorted(name for name in manifest["files"] if form.rows_of(name))[missing])
    (newest / form.MANIFEST).write_text(sealed(manifest))
    with pytest.raises(CorruptCheckpointError, match="lists no files for rows 14 to 24 of lane 0"):
        verify(newest)


@pytest.mark.parametrize("rows", [[14], [24, 14], [-1, 24], "14", [14, 24.0], None, [14, 25], [11, 24], [True, 24]])
def test_values_that_say_other_rows_are_damage(damaged, rows):
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
        (lambda x: x.update({"lane-0003.algorithm.x": torch.tensor(1.0)}), "has other parts than"),
        (
            lambda x: x.update({k: v[:, :1] for k, v in x.items()}),
            "was saved as",
        ),
        (lambda x: x.update({"lane-0003.algorithm.x": torch.ones(4)}), "other parts than"),
        (lambda x: x.update({k: v.double() for k, v in x.items()}), "was saved as torch.float64"),
        (lambda x: [x.pop(k) for k in list(x) if "action" in k], "has other parts than"),
    ],
)
def test_segments_that_are_none_of_this_runs_are_refused_in_words(damaged, edit, sentence):
    path, newest, segment = damaged
    tensors = form.read_tensor_file(segment, None)
    edit(tensors)
    change(newest, segment.name, tensors)
    with pytest.raises(ConfigError) as refused:
        record(path.parent, resume=True, total_samples=7 * ITERATION)
    assert sentence in str(refused.value)


def test_a_lane_that_no_segment_holds_is_damage(whole):
    newest = checkpoints(whole)[-1]
    files = verify(newest)["files"]
    with pytest.raises(CorruptCheckpointError, match=f"lists no files for rows 14 to 24 of lane {LANES}"):
        form.segments(newest, files, LANES, [14, 24])
