"""JSON Lines files: skip lines truncated by a kill and truncate to the point of a resume."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.io.jsonl import append_jsonl, newest_values, read_jsonl, truncate_after


def fill(path, *samples):
    for number in samples:
        append_jsonl(path, {"samples": number, "value": number * 10})


def samples_in(path):
    return [line["samples"] for line in read_jsonl(path)]


def test_read_jsonl_returns_appended_lines(tmp_path):
    fill(tmp_path / "a", 1, 2, 3)
    assert read_jsonl(tmp_path / "a") == [{"samples": n, "value": n * 10} for n in (1, 2, 3)]


def test_missing_file_has_no_lines(tmp_path):
    assert read_jsonl(tmp_path / "a") == []
    assert newest_values(tmp_path / "a", ["samples"]) == {}
    truncate_after(tmp_path / "a", 5)
    assert not (tmp_path / "a").exists()


def test_read_jsonl_skips_truncated_line(tmp_path):
    fill(tmp_path / "a", 1, 2)
    with (tmp_path / "a").open("a") as file:
        file.write('{"samples": 3, "val')
    assert samples_in(tmp_path / "a") == [1, 2]


def test_newest_values_returns_newest_value_of_each_name(tmp_path):
    append_jsonl(tmp_path / "a", {"samples": 1, "loss": 5})
    append_jsonl(tmp_path / "a", {"samples": 2, "eval": 7})
    append_jsonl(tmp_path / "a", {"samples": 3, "loss": 4})
    assert newest_values(tmp_path / "a", ["samples", "loss", "eval"]) == {"samples": 3, "loss": 4, "eval": 7}


def test_truncate_after_drops_lines_beyond_samples(tmp_path):
    fill(tmp_path / "a", 1, 2, 2, 3)
    truncate_after(tmp_path / "a", 2)
    assert samples_in(tmp_path / "a") == [1, 2, 2]


def test_append_after_truncate_of_partial_line_starts_new_line(tmp_path):
    fill(tmp_path / "a", 1)
    with (tmp_path / "a").open("a") as file:
        file.write('{"samples": 2')
    truncate_after(tmp_path / "a", 5)
    fill(tmp_path / "a", 3)
    assert samples_in(tmp_path / "a") == [1, 3]


def test_truncate_after_without_changes_keeps_file(tmp_path):
    (tmp_path / "a").write_text('{"samples":1}\n')  # formatted differently from append_jsonl
    truncate_after(tmp_path / "a", 1)
    assert (tmp_path / "a").read_text() == '{"samples":1}\n'


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 50), st.integers(0, 400))
def test_truncate_after_partial_write_keeps_complete_lines(tmp_path_factory, samples, clock, length):
    path = tmp_path_factory.mktemp("records") / "a"
    path.touch()
    fill(path, *samples)
    path.write_bytes(path.read_bytes()[:length])  # as if killed while writing
    whole = samples_in(path)
    assert whole == samples[: len(whole)]
    truncate_after(path, clock)
    assert samples_in(path) == [number for number in whole if number <= clock]
    fill(path, 99)
    assert samples_in(path)[-1] == 99
