"""Hash chain: entries link to their parents, survive deleted checkpoints, and change with what they describe."""

import json
import shutil
from itertools import pairwise

import pytest

from helpers.manifests import sealed
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.checkpoint import format as form
from lockstep.checkpoint.chain import (
    entry_of,
    follow,
    hash_settings,
    parse_entry,
    plain_settings,
    read_log,
    recorded_settings,
)
from lockstep.checkpoint.lineage import lineage
from lockstep.checkpoint.provenance import describe_provenance, hash_files, provenance_differences
from lockstep.config import apply_overrides
from lockstep.io.jsonl import CHAIN
from lockstep.run_dir import read_config
from lockstep.training_loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four iterations with a save after each, of which one checkpoint is kept. It was resumed once."""
    directory = tmp_path_factory.mktemp("chain")
    train(tiny(directory, keep_last=1), stop_at=2 * ITERATION)
    return train(tiny(directory, keep_last=1), resume=True).path


def newest(run):
    return run / "checkpoints" / str(lineage(run / "checkpoints")[0])


def chain(run):
    head = entry_of(form.read_manifest(newest(run)))
    return follow(head, read_log(run)[0])


def test_chain_reaches_the_start_through_deleted_checkpoints(run):
    entries = chain(run)
    assert [entry.samples for entry in entries] == [ITERATION * number for number in (1, 2, 3, 4)]
    assert entries[0].parent == entries[0].previous == ""
    for before, after in pairwise(entries):
        assert (after.parent, after.previous) == (before.hash, before.checkpoint)
    assert not (run / "checkpoints" / entries[0].checkpoint).exists()


def test_entry_has_hashes_of_the_written_files(run):
    entry, manifest = chain(run)[-1], form.read_manifest(newest(run))
    assert entry.files == manifest["files"]
    assert entry.machine == manifest["machine"]
    assert entry.provenance == describe_provenance("snake-ppo")


def test_settings_of_the_chain_are_those_of_the_config_file(run):
    settings = read_log(run)[1]
    assert plain_settings(*read_config(run)) == settings[chain(run)[0].config]


def test_settings_hash_depends_on_settings_and_not_on_the_directory(tmp_path):
    recipe = tiny(tmp_path)
    first = hash_settings(recorded_settings(recipe, 8))
    assert hash_settings(recorded_settings(tiny(tmp_path / "other", "renamed"), 8)) == first
    assert hash_settings(recorded_settings(recipe, 4)) != first
    assert hash_settings(recorded_settings(apply_overrides(recipe, {"run.seed": 1}), 8)) != first


def test_log_with_lost_lines_still_gives_entries_of_kept_checkpoints(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / CHAIN).write_text((copy / CHAIN).read_text()[:500])
    assert [entry.samples for entry in chain(copy)] == [4 * ITERATION]


def test_checkpoint_without_an_entry_is_still_read(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    manifest = json.loads((newest(copy) / form.MANIFEST).read_text())
    del manifest["chain"]
    (newest(copy) / form.MANIFEST).write_text(sealed(manifest))
    assert entry_of(form.verify(newest(copy))) is None
    result = train(tiny(tmp_path, total_samples=5 * ITERATION), resume=True)
    (first,) = (entry for entry in read_log(result.path)[0].values() if entry.samples == 5 * ITERATION)
    assert first.previous.startswith(f"{4 * ITERATION:012d}")
    assert follow(first, read_log(result.path)[0]) == [first]


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": "../0"},
        {"parent": "abc"},
        {"previous": 3},
        {"processes": True},
        {"processes": 0},
        {"config": ""},
        {"files": {"a": "b"}},
        {"machine": [1]},
        {"provenance": {"a": {"b": {"c": {"d": {"e": 1}}}}}},
        {"extra": 1},
    ],
)
def test_invalid_entry_is_not_parsed(run, change):
    (values,) = [line["entry"] for line in map(json.loads, (run / CHAIN).open()) if "entry" in line][-1:]
    assert parse_entry(values) is not None
    assert parse_entry(values | change) is None


def test_provenance_differences_name_each_difference():
    here = describe_provenance("snake-ppo")
    assert provenance_differences(here, describe_provenance("snake-ppo")) == []
    there = here | {
        "code": "0",
        "packages": here["packages"] | {"gymnasium": "0.1", "other": "1"},
        "cpu": {"model": "Z80", "features": here["cpu"]["features"] + " avx-of-2040"},
    }
    told = "; ".join(provenance_differences(there, here))
    for part in (
        "the source code of Lockstep was changed",
        f"gymnasium was 0.1 and is {here['packages']['gymnasium']}",
        "other was 1 and is missing",
        "the CPU was Z80 and is",
        "only one machine has: avx-of-2040",
    ):
        assert part in told


@pytest.mark.parametrize("untrusted", [{}, {"packages": 3, "cpu": "x"}, {"packages": {"gymnasium": [1]}, "code": None}])
def test_provenance_differences_accept_any_values(untrusted):
    assert provenance_differences(untrusted, describe_provenance("snake-ppo"))


def test_log_with_invalid_lines_is_read(tmp_path):
    nested = "[" * 900 + "]" * 900
    lines = [
        "",
        "[]",
        '{"entry": 3}',
        '{"entry": {"files": 1}}',
        '{"settings": []}',
        f'{{"settings": {{"a": {nested}}}}}',
    ]
    (tmp_path / CHAIN).write_text("\n".join(lines))
    assert read_log(tmp_path) == ({}, {})


def test_hash_of_files_depends_on_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = hash_files([tmp_path / "a.py"], tmp_path)
    (tmp_path / "a.py").write_text("2")
    second = hash_files([tmp_path / "a.py"], tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, hash_files([tmp_path / "b.py"], tmp_path)}) == 3
