"""URLs of runs in a bucket. This module imports nothing of fsspec."""

import re
from pathlib import Path

from lockstep.config import ConfigError

_OF_PAGES = ("http", "https")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.ASCII | re.DOTALL)


def is_url(location: object) -> bool:
    """Return whether a location is the URL of a bucket: not a path, and not that of a web page."""
    match = _URL.fullmatch(str(location))
    return match is not None and match[1] not in _OF_PAGES


def check_url(url: str) -> str:
    """Return a URL without a slash at its end. Raise ConfigError if it cannot be that of a bucket."""
    match = _URL.fullmatch(url)
    if match is None or match[1] in _OF_PAGES:
        raise ConfigError(f"{url} is not the URL of a bucket.", "Use one such as s3://bucket/runs.")
    protocol, rest = match[1], match[2].rstrip("/")
    if protocol in ("file", "local"):
        raise ConfigError(f"{url} is a directory.", f"Use its path: {rest}")
    if "@" in rest.partition("/")[0] and protocol not in ("abfs", "abfss"):
        raise ConfigError(
            f"the {protocol} URL contains a user or a password.",
            "Credentials come from the environment, such as AWS_ACCESS_KEY_ID, and must not be in a URL.",
        )
    if not rest:
        raise ConfigError(f"{url} names no bucket.", f"Use {protocol}://BUCKET/runs.")
    return f"{protocol}://{rest}"


def split_run_url(url: str) -> tuple[str, str]:
    """Split the URL of a run into that of its parent, which is `run.runs_dir`, and its name."""
    parent, _, name = check_url(url).rpartition("/")
    if parent.endswith(":/") or not is_run_name(name):
        raise ConfigError(f"{url} is not the URL of a run.", "Use URL/NAME. List the runs: lockstep ls URL")
    return parent, name


def is_run_name(name: str) -> bool:
    """Return whether a name can be that of a run: one folder that is not hidden, so that it leads nowhere else."""
    return bool(name) and not name.startswith(".") and not {"/", "\\", "\0"} & set(name)


def join(location: str, name: str) -> str:
    """Return the location of a file or run inside a URL or a directory."""
    return f"{location.rstrip('/')}/{name}" if is_url(location) else str(Path(location) / name)
