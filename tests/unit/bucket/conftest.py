"""Fixtures of the tests of buckets."""

from helpers.bucket_fixtures import memory_url, s3, s3_server

__all__ = ["memory_url", "s3", "s3_server"]
