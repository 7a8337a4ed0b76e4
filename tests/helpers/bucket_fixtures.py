"""Fixtures of tests with buckets: one in memory, and one on a real S3 server. Import them in a conftest.py."""

import os
import uuid

import pytest

from helpers.s3_server import S3Server, make_bucket


@pytest.fixture
def memory_url():
    """URL of an empty folder in the memory of this process."""
    return f"memory://bucket/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def s3_server():
    server = S3Server()
    before = dict(os.environ)
    os.environ.update(server.environment)
    yield server
    server.close()
    for name in server.environment:
        os.environ.pop(name)
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture
def s3(s3_server):
    """The server, with a new bucket at `s3.url`, without faults and with an empty list of requests."""
    s3_server.url = make_bucket(s3_server.environment, f"bucket-{uuid.uuid4().hex[:12]}")
    s3_server.requests.clear()
    yield s3_server
    s3_server.fault = lambda request: ""
    s3_server.record = None
