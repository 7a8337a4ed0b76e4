"""Requests to a real S3 server that delays, fails, throttles, hangs up, or refuses the credentials."""

import os
import threading

import pytest

from helpers.s3_server import CREDENTIALS
from lockstep.bucket import client
from lockstep.bucket.client import ATTEMPTS, Bucket
from lockstep.config import ConfigError


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)


class Times:
    """A fault that the first requests of a method have."""

    def __init__(self, fault, count, method="PUT"):
        self.fault, self.left, self.method = fault, count, method

    def __call__(self, request):
        if request.method != self.method or not self.left:
            return ""
        self.left -= 1
        return self.fault


def test_objects_are_written_read_listed_and_deleted(s3, tmp_path):
    bucket = Bucket(f"{s3.url}/runs")
    assert bucket.list() == ([], [])
    bucket.put("one/status.json", b"1")
    (tmp_path / "file").write_bytes(b"x" * 1000)
    bucket.upload(tmp_path / "file", "one/logs/a.log")
    assert bucket.read("one/status.json") == b"1"
    assert bucket.list("one") == (["status.json"], ["logs"])
    assert bucket.find("one") == {"one/status.json": 1, "one/logs/a.log": 1000}
    bucket.put("one-2/status.json", b"of another run")
    assert bucket.find("one") == {"one/status.json": 1, "one/logs/a.log": 1000}
    bucket.delete_all("one-2")
    assert bucket.below("one").find("") == {"status.json": 1, "logs/a.log": 1000}
    bucket.download("one/logs/a.log", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"x" * 1000
    assert bucket.exists("one/status.json")
    bucket.delete("one/status.json")
    bucket.delete("one/status.json")
    assert not bucket.exists("one/status.json")
    with pytest.raises(FileNotFoundError):
        bucket.read("one/status.json")
    with pytest.raises(FileNotFoundError):
        bucket.download("one/status.json", tmp_path / "missing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "file"]
    bucket.delete_all("one")
    assert bucket.find("") == {}


def test_one_of_many_creates_an_object(s3):
    winners, start = [], threading.Barrier(8)

    def work(number):
        bucket = Bucket(s3.url)
        start.wait()
        try:
            bucket.create("claim", f"process {number}".encode())
            winners.append(number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Bucket(s3.url).read("claim") == f"process {winners[0]}".encode()
    assert len(winners) == 1


@pytest.mark.parametrize("fault", ["error", "slow down", "torn", "slow", "lost answer"])
def test_request_is_repeated_after_a_fault(s3, fault, tmp_path):
    bucket = Bucket(s3.url)
    s3.fault = Times(fault, ATTEMPTS - 1)
    bucket.put("key", b"content" * 1000)
    assert bucket.read("key") == b"content" * 1000
    (tmp_path / "file").write_bytes(b"y" * 200_000)
    s3.fault = Times(fault, ATTEMPTS - 1)
    bucket.upload(tmp_path / "file", "file")
    s3.fault = Times(fault, ATTEMPTS - 1, "GET")
    assert len(bucket.read("file")) == 200_000


def test_creation_whose_answer_was_lost_succeeds_and_another_one_fails(s3):
    s3.fault = Times("lost answer", 1)
    Bucket(s3.url).create("claim", b"mine")
    with pytest.raises(FileExistsError):
        Bucket(s3.url).create("claim", b"of another")
    assert Bucket(s3.url).read("claim") == b"mine"


@pytest.mark.parametrize("fault", ["error", "slow down", "torn"])
def test_bucket_that_does_not_answer_is_an_error_after_a_few_attempts(s3, fault):
    bucket = Bucket(s3.url)
    s3.fault = Times(fault, 1000)
    with pytest.raises(OSError, match=rf"{s3.url}/key: .* \(after {ATTEMPTS} attempts\)"):
        bucket.put("key", b"content")
    # aiohttp repeats a request once if a connection that was used before is closed.
    assert len(s3.requests) == ATTEMPTS * (2 if fault == "torn" else 1)
    s3.fault = lambda request: ""
    assert not bucket.exists("key")


def test_server_that_is_gone_is_an_error(s3):
    bucket = Bucket(s3.url)
    settings = {"config_kwargs": {"retries": {"total_max_attempts": 1}}, "skip_instance_cache": True}
    bucket._fs = type(bucket._fs)(endpoint_url="http://127.0.0.1:9", **settings)
    with pytest.raises(OSError, match=r"after 4 attempts"):
        bucket.put("key", b"")


def test_lost_credentials_are_not_tried_again_and_appear_nowhere(s3):
    bucket = Bucket(s3.url)
    s3.fault = lambda request: "no credentials"
    with pytest.raises(PermissionError, match="ExpiredToken") as refused:
        bucket.put("key", b"content")
    assert len(s3.requests) == 1
    assert not any(secret in str(refused.value) for secret in CREDENTIALS.values())
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in repr(bucket.__dict__)


def test_secrets_are_removed_from_errors(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrX")
    assert client._without_secrets(OSError("signed with wJalrX")) == "signed with ***"


def test_protocol_without_its_package_names_the_extra():
    with pytest.raises(ConfigError, match="Use s3://, gs://, az://"):
        Bucket("nothing://bucket/runs")


def test_recorded_files_are_the_objects(s3, tmp_path):
    s3.record = tmp_path
    bucket = Bucket(f"{s3.url}/runs")
    for name in "abcd":
        bucket.put(f"{name}/file", name.encode())
    bucket.delete("a/file")
    bucket.delete_many(["b/file", "c/file"])  # one request
    assert {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"file": "d"}
    assert bucket.list() == ([], ["d"])
