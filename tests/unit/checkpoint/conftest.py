"""Fixtures of the tests of checkpoints."""

from helpers.bucket_fixtures import memory_url

__all__ = ["memory_url"]
