"""Lines of json: read past what a kill cut in half, and cut back to where a resumed run begins."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.io.jsonl import append_jsonl, last_values, read_jsonl, truncate_after


def fill(path, *samples):
    for number in samples:
        append_jsonl(path, {"samples": number, "value": number * 10})


def samples_in(path):
    return [line["samples"] for line in read_jsonl(path)]


def test_lines_are_read_as_they_were_appended(tmp_path):
    fill(tmp_path / "a", 1, 2, 3)
    assert read_jsonl(tmp_path / "a") == [{"samples": n, "value": n * 10} for n in (1, 2, 3)]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert read_jsonl(tmp_path / "a") == []
    assert last_values(tmp_path / "a") == {}
    truncate_after(tmp_path / "a", 5)
    assert not (tmp_path / "a").exists()


def test_a_line_cut_in_half_is_passed_over(tmp_path):
    fill(tmp_path / "a", 1, 2)
    with (tmp_path / "a").open("a") as file:
        file.write('{"samples": 3, "val')
    assert samples_in(tmp_path / "a") == [1, 2]


def test_the_newest_value_of_everything_is_kept_though_it_be_of_an_older_line(tmp_path):
    append_jsonl(tmp_path / "a", {"samples": 1, "loss": 5})
    append_jsonl(tmp_path / "a", {"samples": 2, "eval": 7})
    append_jsonl(tmp_path / "a", {"samples": 3, "loss": 4})
    assert last_values(tmp_path / "a") == {"samples": 3, "loss": 4, "eval": 7}


def test_cutting_drops_what_lies_beyond_and_keeps_what_does_not(tmp_path):
    fill(tmp_path / "a", 1, 2, 2, 3)
    truncate_after(tmp_path / "a", 2)
    assert samples_in(tmp_path / "a") == [1, 2, 2]


def test_after_cutting_a_half_line_the_next_one_stands_alone(tmp_path):
    fill(tmp_path / "a", 1)
    with (tmp_path / "a").open("a") as file:
        file.write('{"samples": 2')
    truncate_after(tmp_path / "a", 5)
    fill(tmp_path / "a", 3)
    assert samples_in(tmp_path / "a") == [1, 3]


def test_a_file_with_nothing_to_cut_is_not_written_again(tmp_path):
    (tmp_path / "a").write_text('{"samples":1}\n')  # spaced otherwise than we would
    truncate_after(tmp_path / "a", 1)
    assert (tmp_path / "a").read_text() == '{"samples":1}\n'


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 50), st.integers(0, 400))
def test_a_file_cut_anywhere_and_cut_back_holds_whole_lines_up_to_the_clock(tmp_path_factory, samples, clock, length):
    path = tmp_path_factory.mktemp("records") / "a"
    path.touch()
    fill(path, *samples)
    path.write_bytes(path.read_bytes()[:length])  # killed while writing
    whole = samples_in(path)
    assert whole == samples[: len(whole)]
    truncate_after(path, clock)
    assert samples_in(path) == [number for number in whole if number <= clock]
    fill(path, 99)
    assert samples_in(path)[-1] == 99
