"""Generations: each is claimed by one start; readers follow the newest and ignore late saves of older ones."""

import json
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.claims import claim
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.lineage import (
    CheckpointName,
    find,
    lineage,
    list_checkpoints,
    newest_generation,
    parent_of,
    read_claim,
)
from lockstep.config import ConfigError


def publish(directory, samples, generation):
    name = CheckpointName(samples, generation)
    (directory / str(name)).mkdir()
    return name


def line_of(directory):
    return [(name.samples, name.generation) for name in lineage(directory)]


# ---------------------------------------------------------------------------------------------------------------- names


@given(st.integers(0, 10**15), st.integers(0, 10**6))
def test_checkpoint_name_survives_round_trip(samples, generation):
    assert CheckpointName.parse(str(CheckpointName(samples, generation))) == CheckpointName(samples, generation)


@pytest.mark.parametrize("text", ["", "latest", "12", "12-g", "x12-g1", "12-g1.partial", ".12-g1", "../12-g1", "-1-g1"])
def test_parse_of_invalid_name_is_none(text):
    assert CheckpointName.parse(text) is None


def test_names_sort_by_samples_also_as_strings():
    names = [CheckpointName(5, 9), CheckpointName(40, 1), CheckpointName(300, 2), CheckpointName(300, 3)]
    assert sorted(names) == names
    assert sorted(map(str, names)) == [str(name) for name in names]


# --------------------------------------------------------------------------------------------------------------- claims


def test_claims_are_numbered_and_store_their_parent(tmp_path):
    assert newest_generation(tmp_path) == 0
    assert claim(tmp_path, None) == 1
    assert claim(tmp_path, CheckpointName(512, 1)) == 2
    assert newest_generation(tmp_path) == 2
    assert (parent_of(tmp_path, 1), parent_of(tmp_path, 2)) == (None, CheckpointName(512, 1))


def test_claim_records_job_processes_pid_and_time(tmp_path):
    start = GenerationFence(tmp_path, main=True)
    start.begin(None, "job", processes=3)
    start.confirm(None, [])
    claimed = read_claim(tmp_path, 1)
    assert claimed["parent"] is None
    assert (claimed["job"], claimed["processes"], claimed["pid"]) == ("job", 3, os.getpid())
    assert abs(claimed["began"] - time.time()) < 3600


def test_concurrent_claims_get_distinct_generations(tmp_path):
    ready, claimed = threading.Barrier(8), []

    def start():
        ready.wait()
        for _ in range(5):
            fence = GenerationFence(tmp_path, main=True)
            fence.begin(None)
            claimed.append(fence.generation)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 41))


def test_newest_generation_ignores_other_file_names(tmp_path):
    for name in ("attempt-x.json", "attempt-0007.json.bak", "attempt-.json"):
        (tmp_path / name).write_text("{}")
    assert newest_generation(tmp_path) == 0


# -------------------------------------------------------------------------------------------------------------- lineage


def test_lineage_of_uninterrupted_run_is_newest_first(tmp_path):
    claim(tmp_path, None)
    for samples in (200, 100, 300):
        publish(tmp_path, samples, 1)
    assert line_of(tmp_path) == [(300, 1), (200, 1), (100, 1)]


def test_lineage_of_resumed_run_continues_from_parent(tmp_path):
    claim(tmp_path, None)
    for samples in (100, 200, 300):
        publish(tmp_path, samples, 1)
    claim(tmp_path, CheckpointName(200, 1))
    assert line_of(tmp_path) == [(300, 1), (200, 1), (100, 1)]  # a start without checkpoints changes nothing
    publish(tmp_path, 300, 2)
    assert line_of(tmp_path) == [(300, 2), (200, 1), (100, 1)]


def test_lineage_ignores_late_checkpoint_of_older_generation(tmp_path):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    claim(tmp_path, CheckpointName(100, 1))
    publish(tmp_path, 200, 2)
    publish(tmp_path, 900, 1)  # published by an older instance of the run
    assert line_of(tmp_path) == [(200, 2), (100, 1)]
    assert CheckpointName(900, 1) in list_checkpoints(tmp_path)


def test_lineage_spans_generations_and_skips_abandoned_ones(tmp_path):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    publish(tmp_path, 200, 1)
    claim(tmp_path, CheckpointName(200, 1))
    publish(tmp_path, 300, 2)
    claim(tmp_path, CheckpointName(100, 1))  # back to the first checkpoint
    publish(tmp_path, 150, 3)
    claim(tmp_path, CheckpointName(150, 3))
    assert line_of(tmp_path) == [(150, 3), (100, 1)]


def test_generation_without_parent_starts_new_lineage(tmp_path):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    claim(tmp_path, None)
    publish(tmp_path, 50, 2)
    assert line_of(tmp_path) == [(50, 2)]


def test_lineage_ends_at_parent_that_is_not_older(tmp_path):
    (tmp_path / "attempt-0001.json").write_text(json.dumps({"parent": str(CheckpointName(100, 1))}))
    (tmp_path / "attempt-0002.json").write_text(json.dumps({"parent": str(CheckpointName(100, 7))}))
    publish(tmp_path, 100, 2)
    assert line_of(tmp_path) == [(100, 2)]


@pytest.mark.parametrize("text", ["", '{"par', "[]", '{"parent": 3}'])
def test_truncated_claim_does_not_hide_checkpoints(tmp_path, text):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    publish(tmp_path, 200, 1)
    (tmp_path / "attempt-0002.json").write_text(text)
    assert line_of(tmp_path) == [(200, 1), (100, 1)]
    assert claim(tmp_path, CheckpointName(200, 1)) == 3
    assert line_of(tmp_path) == [(200, 1), (100, 1)]


def test_list_checkpoints_ignores_files_and_partial_directories(tmp_path):
    claim(tmp_path, None)
    (tmp_path / ".000000000100-g0001.partial").mkdir()
    (tmp_path / "000000000200-g0001").write_text("a file")
    publish(tmp_path, 300, 1)
    assert list_checkpoints(tmp_path) == [CheckpointName(300, 1)]


@given(st.data())
def test_lineage_contains_only_ancestors(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("line")
    history: list[CheckpointName] = []  # checkpoints of the current history
    for generation in range(1, data.draw(st.integers(1, 4)) + 1):
        parent = data.draw(st.sampled_from(history)) if history else None
        assert claim(directory, parent) == generation
        samples = parent.samples if parent else 0
        for number, step in enumerate(data.draw(st.lists(st.integers(1, 3), max_size=3))):
            if number == 0:  # the first checkpoint of this start replaces later history
                history = history[: history.index(parent) + 1] if parent else []
            samples += step
            history.append(publish(directory, samples, generation))
    assert lineage(directory) == history[::-1]


# ------------------------------------------------------------------------------------------------------------ takeovers


@pytest.fixture
def whole(monkeypatch):
    """Accept empty directories as valid checkpoints."""
    monkeypatch.setattr("lockstep.checkpoint.format.verify", lambda directory, replay: None)


def started(directory, at=None):
    start = GenerationFence(directory, main=True)
    return start, start.begin(at)[0]


def test_older_start_is_superseded_only_after_newer_confirms(tmp_path, whole):
    old, _ = started(tmp_path)
    old.confirm(None, [])
    publish(tmp_path, 100, 1)
    new, chosen = started(tmp_path)
    assert not old.superseded()
    new.confirm(chosen, [])
    assert old.superseded()
    assert not new.superseded()


def test_start_that_cannot_load_withdraws_its_claim(tmp_path, whole):
    old, _ = started(tmp_path)
    old.confirm(None, [])
    publish(tmp_path, 100, 1)
    new, chosen = started(tmp_path)
    with pytest.raises(ConfigError, match="no memory left"):
        new.confirm(chosen, ["no memory left", "no memory left"])
    assert newest_generation(tmp_path) == 1
    assert not old.superseded()


def test_confirm_uses_next_checkpoint_when_chosen_one_was_deleted(tmp_path, whole):
    old, _ = started(tmp_path)
    old.confirm(None, [])
    publish(tmp_path, 100, 1)
    new, chosen = started(tmp_path)
    publish(tmp_path, 200, 1)
    (tmp_path / str(chosen)).rmdir()
    following, _ = new.confirm(chosen, ["a file is missing"])
    assert following == CheckpointName(200, 1)
    assert new.confirm(following, [])[0] == following
    assert parent_of(tmp_path, 2) == CheckpointName(200, 1)


def test_start_at_older_checkpoint_without_saves_discards_nothing(tmp_path, whole):
    claim(tmp_path, None)
    for samples in (100, 200, 300):
        publish(tmp_path, samples, 1)
    back, chosen = started(tmp_path, at=100)
    assert back.confirm(chosen, [])[0] == CheckpointName(100, 1)
    assert find(tmp_path)[0] == CheckpointName(300, 1)


def test_implausible_generation_number_is_rejected(tmp_path):
    (tmp_path / "attempt-999999999.json").write_text("{}")
    with pytest.raises(ConfigError, match="more starts than a run can have"):
        started(tmp_path)
