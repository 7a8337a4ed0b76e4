"""URLs of runs: which are accepted, and that none contains credentials."""

import pytest

from lockstep.bucket.urls import check_url, is_url, join, split_run_url
from lockstep.config import ConfigError


@pytest.mark.parametrize("url", ["s3://b/runs", "gs://b", "memory://b/runs"])
def test_url_of_a_bucket_is_recognized(url):
    assert is_url(url)


@pytest.mark.parametrize("path", ["runs", "/a/b", "s3:/b", "run.runs_dir=s3://b", "https://huggingface.co/ada/snake"])
def test_path_or_page_is_no_url_of_a_bucket(path):
    assert not is_url(path)


def test_url_is_split_and_joined():
    assert check_url("s3://bucket/runs/") == "s3://bucket/runs"
    assert split_run_url("s3://bucket/runs/one/") == ("s3://bucket/runs", "one")
    assert join("s3://bucket/runs/", "one") == "s3://bucket/runs/one"
    assert join("runs", "one") == "runs/one"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:secret@bucket/runs", "contains a user or a password"),
        ("file:///tmp/runs", "is a directory"),
        ("s3://", "is not the URL of a bucket"),
        ("https://example.org/runs", "is not the URL of a bucket"),
        ("s3:///", "names no bucket"),
    ],
)
def test_url_that_cannot_be_used_is_refused_without_its_secret(url, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/runs/..", "s3://bucket/.jobs", "s3://bucket/a\\b"])
def test_url_without_the_name_of_a_run_is_refused(url):
    with pytest.raises(ConfigError, match="not the URL of a run"):
        split_run_url(url)
