"""Uploads of logs as parts, and what a download makes of them."""

from lockstep.bucket import mirror
from lockstep.bucket.client import Bucket
from lockstep.bucket.mirror import Mirror, download, is_run_file


def everything(name):
    return True


def start(directory, url, generation):
    made = Mirror(directory, Bucket(url), everything)
    made._generation = generation
    return made


def append(path, text):
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def content(url, directory):
    directory.mkdir()
    download(Bucket(url), directory, everything)
    return {path.relative_to(directory).as_posix(): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_lines_are_uploaded_once_and_joined(memory_url, tmp_path):
    run = tmp_path / "run"
    made = start(run, memory_url, 1)
    append(run / "metrics.jsonl", "a\n")
    append(run / "status.json", "running")
    made.flush()
    append(run / "metrics.jsonl", "b\n")
    made.flush()
    made.flush()  # nothing has changed
    (run / "status.json").write_text("finished")
    made.flush()
    keys = Bucket(memory_url).find("")
    assert keys == {
        "metrics.jsonl.parts/0001-0000-000000": 2,
        "metrics.jsonl.parts/0001-0000-000001": 2,
        "status.json": 8,
    }
    assert content(memory_url, tmp_path / "copy") == {"metrics.jsonl": "a\nb\n", "status.json": "finished"}


def test_new_start_replaces_lines_beyond_its_checkpoint_but_keeps_logs_of_starts(memory_url, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    append(first / "metrics.jsonl", "a\nbeyond\n")
    append(first / "logs" / "process-0.log", "first\n")
    older = start(first, memory_url, 1)
    older.flush()
    append(second / "metrics.jsonl", "a\nb\n")
    append(second / "logs" / "process-0.log", "second\n")
    start(second, memory_url, 2).flush()
    append(first / "metrics.jsonl", "late\n")  # the older start does not know yet
    older.flush()
    files = content(memory_url, tmp_path / "copy")
    assert files == {"metrics.jsonl": "a\nb\n", "logs/process-0.log": "first\nsecond\n"}


def test_many_parts_are_merged(memory_url, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "MAX_PARTS", 4)
    run = tmp_path / "run"
    made = start(run, memory_url, 1)
    for number in range(11):
        append(run / "metrics.jsonl", f"{number}\n")
        made.flush()
        assert len(Bucket(memory_url).find("metrics.jsonl.parts")) <= 4
    expected = "".join(f"{number}\n" for number in range(11))
    assert content(memory_url, tmp_path / "copy")["metrics.jsonl"] == expected


def test_part_after_a_missing_one_is_not_read(memory_url, tmp_path):
    bucket = Bucket(memory_url)
    for number, text in ((0, b"a\n"), (1, b"b\n"), (3, b"d\n")):
        bucket.put(f"metrics.jsonl.parts/0001-0000-{number:06d}", text)
    assert content(memory_url, tmp_path / "copy") == {"metrics.jsonl": "a\nb\n"}


def test_names_that_lead_out_of_the_directory_are_ignored(memory_url, tmp_path):
    bucket = Bucket(memory_url)
    for key in ("a/../../evil.json", "logs/.hidden", "checkpoints/latest", "a b.json", "config.yaml"):
        bucket.put(key, b"x")
    assert content(memory_url, tmp_path / "copy") == {"config.yaml": "x"}
    assert not is_run_file("../evil.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_bucket_that_does_not_answer_is_reported_once_and_logs_are_uploaded_later(memory_url, tmp_path, caplog):
    append(tmp_path / "run" / "metrics.jsonl", "a\n")
    made = Mirror(tmp_path / "run", Bucket(memory_url), everything)
    answers = iter([OSError("no route"), OSError("no route"), False, True])

    def before():
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    made.begin(1, before, seconds=0.01)
    made._thread.join(10)
    assert [record.getMessage().count("no route") for record in caplog.records] == [1]
    assert content(memory_url, tmp_path / "copy") == {"metrics.jsonl": "a\n"}


def test_background_uploads_stop_when_a_newer_start_takes_over(memory_url, tmp_path):
    append(tmp_path / "run" / "status.json", "running")
    made = Mirror(tmp_path / "run", Bucket(memory_url), everything)
    answers = iter([False, True])
    made.begin(1, lambda: next(answers), seconds=0.01)
    made._thread.join(10)
    assert not made._thread.is_alive()
    assert Bucket(memory_url).read("status.json") == b"running"
