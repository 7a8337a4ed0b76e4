"""The record of a fork is read strictly, because it may come from an untrusted source."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.run_fixtures import write_run
from lockstep.fork_record import ForkRecord, describe_fork, parent_exists, read_fork, run_id
from lockstep.io.safe_read import UnreadableFileError

RECORD = ForkRecord("/runs/base", "0" * 16, 256, "a" * 64, {"algo.gamma": [0.99, 0.9]})


def written(path, record=RECORD, **changed):
    path.mkdir(exist_ok=True)
    (path / "fork.json").write_text(json.dumps(json.loads(record.to_json()) | changed))
    return path


def test_record_round_trip_returns_same_record(tmp_path):
    assert read_fork(written(tmp_path)) == RECORD
    assert read_fork(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"parent": "relative"}, "parent"),
        ({"parent": "/" + "x" * 5000}, "parent"),
        ({"parent": 1}, "parent"),
        ({"parent_id": "../.."}, "parent_id"),
        ({"samples": -1}, "samples"),
        ({"samples": True}, "samples"),
        ({"samples": 1e9}, "samples"),
        ({"hash": "A" * 64}, "hash"),
        ({"changes": {"algo.gamma": [1]}}, "changes"),
        ({"changes": {"\x1b[2J": [1, 2]}}, "changes"),
        ({"changes": {"a": [[[[[[[[]]]]]]], 1]}}, "changes"),
        ({"more": 1}, "fields"),
        ({"format": 4}, "format 4"),
        ({"format": "x"}, "not a version number"),
    ],
)
def test_invalid_record_is_refused_with_reason(tmp_path, changed, problem):
    with pytest.raises(UnreadableFileError, match=problem):
        read_fork(written(tmp_path, **changed))


def test_record_that_is_a_link_or_too_large_is_refused(tmp_path):
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "fork.json").symlink_to(written(tmp_path / "other") / "fork.json")
    with pytest.raises(UnreadableFileError, match="is a link"):
        read_fork(tmp_path / "link")
    with pytest.raises(UnreadableFileError, match="more than the limit"):
        read_fork(written(tmp_path / "large", changes={f"a{number}": [0, "x" * 100] for number in range(3000)}))


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_read_or_refused(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("run")
    for record in (
        value,
        json.loads(RECORD.to_json()) | {"changes": value},
        json.loads(RECORD.to_json()) | {"parent": value},
    ):
        (path / "fork.json").write_text(json.dumps(record))
        try:
            found = read_fork(path)
        except UnreadableFileError:
            continue
        assert describe_fork(found)


def test_parent_is_recognized_by_its_first_claim(tmp_path):
    claims = [{"parent": None, "host": "a", "pid": 1, "began": 1.0}]
    base = write_run(tmp_path / "base", claims=claims)
    record = ForkRecord(str(base), run_id(base), 256, "a" * 64, {"algo.gamma": [0.99, 0.9]})
    assert parent_exists(record)
    assert describe_fork(record) == "fork of base at 256 samples: algo.gamma 0.99 -> 0.9"
    base.rename(tmp_path / "moved")
    assert run_id(tmp_path / "moved") == record.parent_id
    write_run(base, claims=[{**claims[0], "began": 2.0}])  # another run with the same name
    assert not parent_exists(record)
    assert f"({base} was deleted or moved)" in describe_fork(record)
