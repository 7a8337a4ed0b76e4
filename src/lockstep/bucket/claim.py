"""Claim the name of a new run in a bucket: no other start can get the same one."""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.bucket.client import Bucket
from lockstep.config import ConfigError
from lockstep.io.jsonl import STATUS


def claim_name(
    runs: Bucket,
    preferred: str,
    numbered: bool,
    status: Mapping[str, Any],
    before: Callable[[str], None] = lambda name: None,
) -> str:
    """Create the status of a new run. Return its name.

    Args:
        runs: The bucket of the runs.
        preferred: Name of the run.
        numbered: Whether to add a number to a name that exists. Otherwise, ConfigError is raised.
        status: First status. It must differ from that of every other start, so that a start knows its own.
        before: Called with each name before it is claimed.
    """
    content = json.dumps(dict(status), indent=2).encode()
    for number in itertools.count(1):
        name = preferred if number == 1 else f"{preferred}-{number}"
        before(name)
        try:
            runs.create(f"{name}/{STATUS}", content)
        except FileExistsError:
            if not numbered:
                raise ConfigError(
                    f"{runs.url}/{name} already contains a run.",
                    f"Resume it: lockstep resume {runs.url}/{name}\nOr choose another --run.name.",
                ) from None
            continue
        _require_exclusive_creation(runs, f"{name}/{STATUS}", content)
        return name
    raise AssertionError("unreachable: itertools.count does not end")


def _require_exclusive_creation(runs: Bucket, key: str, content: bytes) -> None:
    """Raise ConfigError if an object that exists can be created again: two starts of a run would both continue."""
    try:
        runs.create(key, content + b"\n")
    except FileExistsError:
        return
    runs.delete(key)
    raise ConfigError(
        f"{runs.url} creates objects that exist: its server ignores the condition `If-None-Match: *`.",
        "Use storage with conditional writes (S3, Google Cloud Storage, Azure, MinIO), or upgrade the server.",
    )
