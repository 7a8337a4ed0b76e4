"""Forks: equal to their parent, independent of it, and with shared replay."""

import errno
import json
import os
import shutil

import pytest
import torch

import lockstep
from helpers.multiprocess import together
from helpers.recorder import ITERATION, Recording, record
from helpers.tiny_recipes import ITERATION as TINY
from helpers.tiny_recipes import checkpoints_of, hash_of, tiny
from lockstep import forking
from lockstep.checkpoint import copying, incremental
from lockstep.checkpoint.lineage import find
from lockstep.config import ConfigError, apply_overrides
from lockstep.fork_record import read_fork
from lockstep.forking import create_fork
from lockstep.inference import load_algorithm, load_recipe
from lockstep.io.jsonl import read_jsonl, read_status
from lockstep.training_loop import train


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run of six iterations with replay and a checkpoint after each."""
    return record(tmp_path_factory.mktemp("runs"), "parent")


def recipe_of(parent, **run):
    return apply_overrides(Recording(), {"run": {"runs_dir": str(parent.parent), "name": parent.name, **run}})


def fork(parent, directory, at=3 * ITERATION, **run):
    run = {"runs_dir": str(directory), "name": "fork", **run}
    return create_fork(parent, at, recipe_of(parent), recipe_of(parent, **run))


def segments(run):
    return {path.name: path.stat().st_ino for path in run.glob("checkpoints/*/replay-*")}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_fork_without_changes_has_hash_of_parent_at_every_checkpoint(parent, tmp_path, processes):
    created = fork(parent, tmp_path)
    assert created.record.hash == hash_of(created.path) == hash_of(parent, 3 * ITERATION)
    assert (created.record.changes, created.notes) == ({}, [])
    if processes == 1:
        resume_fork(tmp_path)
    else:
        together(resume_fork, processes, str(tmp_path))
    assert checkpoints_of(created.path) == [number * ITERATION for number in range(3, 7)]
    for samples in checkpoints_of(created.path):
        assert hash_of(created.path, samples) == hash_of(parent, samples)


def resume_fork(directory):
    record(directory, "fork", resume=True)


def test_fork_links_replay_and_copies_other_files(parent, tmp_path):
    path = fork(parent, tmp_path).path
    links = segments(path)
    assert links.items() <= segments(parent).items()
    assert {name.rpartition(".")[2] for name in links} == {"safetensors", "parity"}
    others = [file for file in path.rglob("*") if file.is_file() and file.name not in links]
    assert all(file.stat().st_nlink == 1 for file in others)


@pytest.mark.parametrize("deleted", ["parent", "fork"])
def test_deleting_one_run_leaves_the_other_whole(parent, tmp_path, deleted):
    runs = {"parent": shutil.copytree(parent, tmp_path / "parent")}
    runs["fork"] = fork(runs["parent"], tmp_path).path
    kept = runs["fork" if deleted == "parent" else "parent"]
    before = hash_of(kept)
    shutil.rmtree(runs[deleted])
    assert hash_of(kept) == before
    assert find(kept / "checkpoints")[1] == []


def test_fork_copies_replay_where_links_are_not_possible(parent, tmp_path, monkeypatch):
    def link(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(incremental.os, "link", link)
    created = fork(parent, tmp_path)
    assert "Replay was copied" in created.notes[0]
    assert not {*segments(created.path).values()} & {*segments(parent).values()}
    assert hash_of(created.path) == hash_of(parent, 3 * ITERATION)


def test_fork_has_log_up_to_its_checkpoint_and_can_be_resumed(parent, tmp_path):
    path = fork(parent, tmp_path).path
    assert [line["samples"] for line in read_jsonl(path / "metrics.jsonl")] == [ITERATION, 2 * ITERATION, 3 * ITERATION]
    assert read_status(path)["state"] == "preempted"
    assert (path / "checkpoints" / "latest").read_text() == f"{3 * ITERATION:012d}-g0001"
    assert read_fork(path).parent == str(parent)


def test_fork_of_best_checkpoint_keeps_it_as_best(parent, tmp_path):
    runs = shutil.copytree(parent, tmp_path / "parent")
    best = find(runs / "checkpoints", 3 * ITERATION)[0]
    (runs / "checkpoints" / "best").write_text(str(best))
    assert (fork(runs, tmp_path).path / "checkpoints" / "best").is_file()
    assert not (fork(runs, tmp_path, 4 * ITERATION, name="other").path / "checkpoints" / "best").exists()


def damage(run, samples):
    shared = run / "checkpoints" / str(find(run / "checkpoints", samples)[0]) / "shared.safetensors"
    shared.write_bytes(shared.read_bytes()[:-1] + b"x")


def test_fork_of_damaged_checkpoint_is_refused_or_uses_previous_one(parent, tmp_path):
    run = shutil.copytree(parent, tmp_path / "parent")
    damage(run, 6 * ITERATION)
    with pytest.raises(ConfigError, match=r"damaged: .*parent/checkpoints.*SHA-256 differs"):
        fork(run, tmp_path, 6 * ITERATION)
    assert {path.name for path in tmp_path.iterdir()} == {"parent"}  # nothing is left
    created = fork(run, tmp_path, None)
    assert created.record.samples == 5 * ITERATION
    assert "Using the previous one" in created.notes[0]


@pytest.mark.parametrize("named", [True, False])
def test_checkpoint_deleted_during_fork_is_replaced_by_newer_unless_named(parent, tmp_path, monkeypatch, named):
    """The parent publishes a newer checkpoint and deletes the chosen one while its files are copied."""
    run = shutil.copytree(parent, tmp_path / "parent")
    newest = run / "checkpoints" / str(find(run / "checkpoints")[0])
    newest.rename(tmp_path / "not published")
    calls = []

    def copy(source, target):
        calls.append(source.name)
        if len(calls) == 1:
            (tmp_path / "not published").rename(newest)
            for checkpoint in (run / "checkpoints").glob("*-g0001"):
                if checkpoint != newest:
                    shutil.rmtree(checkpoint)
        return incremental.link_or_copy(source, target)

    monkeypatch.setattr(copying, "link_or_copy", copy)
    if named:
        with pytest.raises(ConfigError, match="was deleted while it was copied"):
            fork(run, tmp_path, 5 * ITERATION)
    else:
        assert fork(run, tmp_path, None, total_samples=7 * ITERATION).record.samples == 6 * ITERATION


def test_fork_with_nothing_to_train_is_refused(parent, tmp_path):
    with pytest.raises(ConfigError, match=f"has nothing to train, because of run.total_samples {6 * ITERATION}"):
        fork(parent, tmp_path, None)
    assert not any(tmp_path.iterdir())
    assert fork(parent, tmp_path, None, total_samples=7 * ITERATION).record.samples == 6 * ITERATION


def test_fork_does_not_use_directory_of_another_run(parent, tmp_path):
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        fork(parent, tmp_path)
    assert os.listdir(tmp_path) == ["fork"]


def test_fork_published_while_another_start_takes_its_name_is_refused(parent, tmp_path, monkeypatch):
    reserve = forking.reserve

    def reserve_with_another(recipe):
        path = reserve(recipe)
        (path / "status.json").touch()
        return path

    monkeypatch.setattr(forking, "reserve", reserve_with_another)
    with pytest.raises(ConfigError, match="is not empty"):
        fork(parent, tmp_path)
    assert os.listdir(tmp_path / "fork") == ["status.json"]


def test_fork_from_python_applies_changes_at_the_first_update(tmp_path):
    """With a learning rate of 0 no parameter changes, from the first update on."""
    run = lockstep.Run(train(tiny(tmp_path, "parent")).path)
    still = lockstep.fork(run, at=2 * TINY, overrides={"algo.learning_rate": 0.0, "run.name": "still"})
    same = lockstep.fork(run, at=2 * TINY, overrides={"run.total_samples": 4 * TINY})
    assert (still.path, same.path.parent) == (tmp_path / "still", tmp_path)
    assert hash_of(same.path) == hash_of(run.path)
    recipe = load_recipe(still.path)
    first, *later = (load_algorithm(still.path, recipe, at).model_state_dict() for at in checkpoints_of(still.path))
    assert len(later) == 2
    assert all(torch.equal(tensor, weights[name]) for weights in later for name, tensor in first.items())
    assert read_fork(still.path).changes == {"algo.learning_rate": [load_recipe(run.path).algo.learning_rate, 0.0]}
    assert still.status == same.status == "finished"
    assert json.loads((still.path / "checkpoints" / "attempt-0002.json").read_text())["parent"].endswith("-g0001")
