"""Generations: one process claims each, and readers follow the newest, whatever an older one publishes late."""

import json
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claims import claim
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
def test_a_name_is_read_back_as_it_was(samples, generation):
    assert CheckpointName.parse(str(CheckpointName(samples, generation))) == CheckpointName(samples, generation)


@pytest.mark.parametrize("text", ["", "latest", "12", "12-g", "x12-g1", "12-g1.partial", ".12-g1", "../12-g1", "-1-g1"])
def test_what_is_no_name_is_none(text):
    assert CheckpointName.parse(text) is None


def test_names_sort_by_samples_also_as_text():
    names = [CheckpointName(5, 9), CheckpointName(40, 1), CheckpointName(300, 2), CheckpointName(300, 3)]
    assert sorted(names) == names
    assert sorted(map(str, names)) == [str(name) for name in names]


# --------------------------------------------------------------------------------------------------------------- claims


def test_claims_count_up_and_remember_their_parents(tmp_path):
    assert newest_generation(tmp_path) == 0
    assert claim(tmp_path, None) == 1
    assert claim(tmp_path, CheckpointName(512, 1)) == 2
    assert newest_generation(tmp_path) == 2
    assert (parent_of(tmp_path, 1), parent_of(tmp_path, 2)) == (None, CheckpointName(512, 1))


def test_a_claim_says_who_goes_on_and_when(tmp_path):
    start = GenerationFence(tmp_path, main=True)
    start.begin(None, "job", processes=3)
    start.confirm(None, [])
    claimed = read_claim(tmp_path, 1)
    assert claimed["parent"] is None
    assert (claimed["job"], claimed["processes"], claimed["pid"]) == ("job", 3, os.getpid())
    assert abs(claimed["began"] - time.time()) < 3600


def test_nobody_can_hold_the_same_generation(tmp_path):
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


def test_files_of_other_names_are_no_generations(tmp_path):
    for name in ("attempt-x.json", "attempt-0007.json.bak", "attempt-.json"):
        (tmp_path / name).write_text("{}")
    assert newest_generation(tmp_path) == 0


# -------------------------------------------------------------------------------------------------------------- lineage


def test_a_run_that_never_stopped_is_one_line_newest_first(tmp_path):
    claim(tmp_path, None)
    for samples in (200, 100, 300):
        publish(tmp_path, samples, 1)
    assert line_of(tmp_path) == [(300, 1), (200, 1), (100, 1)]


def test_a_resumed_run_goes_on_from_its_parent_and_forgets_what_came_after_it(tmp_path):
    claim(tmp_path, None)
    for samples in (100, 200, 300):
        publish(tmp_path, samples, 1)
    claim(tmp_path, CheckpointName(200, 1))
    assert line_of(tmp_path) == [(300, 1), (200, 1), (100, 1)]  # a start that published nothing changes nothing
    publish(tmp_path, 300, 2)
    assert line_of(tmp_path) == [(300, 2), (200, 1), (100, 1)]


def test_what_an_older_generation_publishes_late_is_ignored(tmp_path):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    claim(tmp_path, CheckpointName(100, 1))
    publish(tmp_path, 200, 2)
    publish(tmp_path, 900, 1)  # by the older half of a job that was split
    assert line_of(tmp_path) == [(200, 2), (100, 1)]
    assert CheckpointName(900, 1) in list_checkpoints(tmp_path)


def test_a_line_reaches_back_over_many_generations_and_passes_by_those_that_led_nowhere(tmp_path):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    publish(tmp_path, 200, 1)
    claim(tmp_path, CheckpointName(200, 1))
    publish(tmp_path, 300, 2)
    claim(tmp_path, CheckpointName(100, 1))  # back to the beginning
    publish(tmp_path, 150, 3)
    claim(tmp_path, CheckpointName(150, 3))
    assert line_of(tmp_path) == [(150, 3), (100, 1)]


def test_a_generation_without_a_parent_starts_a_line_of_its_own(tmp_path):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    claim(tmp_path, None)
    publish(tmp_path, 50, 2)
    assert line_of(tmp_path) == [(50, 2)]


def test_a_parent_that_is_not_older_ends_the_line_instead_of_going_round(tmp_path):
    (tmp_path / "attempt-0001.json").write_text(json.dumps({"parent": str(CheckpointName(100, 1))}))
    (tmp_path / "attempt-0002.json").write_text(json.dumps({"parent": str(CheckpointName(100, 7))}))
    publish(tmp_path, 100, 2)
    assert line_of(tmp_path) == [(100, 2)]


@pytest.mark.parametrize("text", ["", '{"par', "[]", '{"parent": 3}'])
def test_a_claim_that_a_kill_cut_in_half_does_not_hide_the_run(tmp_path, text):
    claim(tmp_path, None)
    publish(tmp_path, 100, 1)
    publish(tmp_path, 200, 1)
    (tmp_path / "attempt-0002.json").write_text(text)
    assert line_of(tmp_path) == [(200, 1), (100, 1)]
    assert claim(tmp_path, CheckpointName(200, 1)) == 3
    assert line_of(tmp_path) == [(200, 1), (100, 1)]


def test_files_and_half_written_checkpoints_are_not_published(tmp_path):
    claim(tmp_path, None)
    (tmp_path / ".000000000100-g0001.partial").mkdir()
    (tmp_path / "000000000200-g0001").write_text("a file")
    publish(tmp_path, 300, 1)
    assert list_checkpoints(tmp_path) == [CheckpointName(300, 1)]


@given(st.data())
def test_only_ancestors_are_on_the_line(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("line")
    history: list[CheckpointName] = []  # what the run, as it is now, has gone through
    for generation in range(1, data.draw(st.integers(1, 4)) + 1):
        parent = data.draw(st.sampled_from(history)) if history else None
        assert claim(directory, parent) == generation
        samples = parent.samples if parent else 0
        for number, step in enumerate(data.draw(st.lists(st.integers(1, 3), max_size=3))):
            if number == 0:  # from here on the run is what this start makes of it
                history = history[: history.index(parent) + 1] if parent else []
            samples += step
            history.append(publish(directory, samples, generation))
    assert lineage(directory) == history[::-1]


# ------------------------------------------------------------------------------------------------------------ takeovers


@pytest.fixture
def whole(monkeypatch):
    """Checkpoints here are empty directories: all of them count as whole."""
    monkeypatch.setattr("lockstep.checkpoint.format.verify", lambda directory: None)


def started(directory, at=None):
    start = GenerationFence(directory, main=True)
    return start, start.begin(at)[0]


def test_a_healthy_start_goes_on_while_a_newer_one_loads_and_stops_when_it_has(tmp_path, whole):
    old, _ = started(tmp_path)
    old.confirm(None, [])
    publish(tmp_path, 100, 1)
    new, chosen = started(tmp_path)
    assert not old.superseded()
    new.confirm(chosen, [])
    assert old.superseded()
    assert not new.superseded()


def test_a_start_that_cannot_load_withdraws_its_claim(tmp_path, whole):
    old, _ = started(tmp_path)
    old.confirm(None, [])
    publish(tmp_path, 100, 1)
    new, chosen = started(tmp_path)
    with pytest.raises(ConfigError, match="no memory left"):
        new.confirm(chosen, ["no memory left", "no memory left"])
    assert newest_generation(tmp_path) == 1
    assert not old.superseded()


def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_done_without(tmp_path, whole):
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


def test_a_start_that_goes_back_and_ends_before_its_first_checkpoint_discards_nothing(tmp_path, whole):
    claim(tmp_path, None)
    for samples in (100, 200, 300):
        publish(tmp_path, samples, 1)
    back, chosen = started(tmp_path, at=100)
    assert back.confirm(chosen, [])[0] == CheckpointName(100, 1)
    assert find(tmp_path)[0] == CheckpointName(300, 1)


def test_a_generation_that_no_run_can_have_reached_is_refused(tmp_path):
    (tmp_path / "attempt-999999999.json").write_text("{}")
    with pytest.raises(ConfigError, match="more starts than a run can have"):
        started(tmp_path)
