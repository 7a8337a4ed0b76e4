"""Objects in a bucket: requests with a time limit, repeated after errors, and a creation that only one process wins.

Every method raises OSError if the bucket does not answer, as a disk does. Credentials come from the environment.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lockstep.bucket.urls import check_url
from lockstep.config import ConfigError

ATTEMPTS = 4
"""Number of times that a request is made before it fails."""
FIRST_PAUSE = 0.5
"""Seconds before the second attempt. Every further pause is twice as long."""
REQUEST_SECONDS, SECONDS_PER_GB = 30.0, 120.0
"""Time limit of one attempt, and what each gigabyte adds to it."""
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Packages for protocols that the extra does not cover."""
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AZURE_STORAGE_CONNECTION_STRING")
"""Environment variables whose values must not appear in messages."""
DELETED_AT_ONCE = 1000
"""Objects that one request deletes at most."""
_NOT_REPEATED = (FileExistsError, FileNotFoundError, IsADirectoryError, PermissionError)
"""Errors that are answers: the same request would get them again."""

ResultT = TypeVar("ResultT")


class Listing(NamedTuple):
    """Objects and folders directly below a key, by name."""

    objects: list[str]
    folders: list[str]


class Bucket:
    """Objects below a URL. `on_request` is called before every attempt, so that a watchdog sees progress."""

    def __init__(self, url: str, on_request: Callable[[], object] = lambda: None) -> None:
        self.url, self.on_request = check_url(url), on_request
        self._fs, self._root = _open(self.url)

    def below(self, name: str) -> "Bucket":
        """Return the objects below a key."""
        return Bucket(f"{self.url}/{name}", self.on_request)

    def put(self, key: str, data: bytes) -> None:
        """Write an object. Readers see the whole old one or the whole new one."""
        self._repeat(key, lambda: self._call("pipe_file", self._path(key), data, size=len(data)))

    def create(self, key: str, data: bytes) -> None:
        """Write a new object. Raise FileExistsError if there is one with other content: another process has won.

        The content must be that of one process only. An attempt whose answer was lost may have written it.
        """
        try:
            self._repeat(key, lambda: self._call("pipe_file", self._path(key), data, mode="create", size=len(data)))
        except FileExistsError:
            if self.read(key) != data:
                raise FileExistsError(f"{self.url}/{key} exists") from None

    def upload(self, path: Path, key: str) -> None:
        """Write an object with the content of a file."""
        size = path.stat().st_size
        self._repeat(key, lambda: self._call("put_file", str(path), self._path(key), size=size))

    def read(self, key: str) -> bytes:
        """Read a small object. Raise FileNotFoundError if there is none."""
        return bytes(self._repeat(key, lambda: self._call("cat_file", self._path(key))))

    def download(self, key: str, path: Path) -> None:
        """Copy an object to a file, which is replaced when the copy is complete."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            self._repeat(key, lambda: self._call("get_file", self._path(key), str(partial), size=2**33))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        return bool(self._repeat(key, lambda: self._call("exists", self._path(key))))

    def list(self, key: str = "") -> Listing:
        """List what is directly below a key, which is empty if nothing is."""
        path = self._path(key).rstrip("/")
        try:
            entries = self._repeat(key, lambda: self._call("ls", path, detail=True))
        except FileNotFoundError:
            return Listing([], [])
        found = {"file": set[str](), "directory": set[str]()}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rpartition("/")[2]
            if str(entry["name"]).strip("/") != path.strip("/"):
                found["directory" if entry["type"] == "directory" else "file"].add(name)
        return Listing(sorted(found["file"]), sorted(found["directory"]))

    def find(self, key: str) -> dict[str, int]:
        """Return all objects below a key with their sizes, by key."""
        try:
            found = self._repeat(key, lambda: self._call("find", self._path(key), detail=True))
        except FileNotFoundError:
            return {}
        return {str(path)[len(self._root) :].strip("/"): int(entry["size"]) for path, entry in found.items()}

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""
        try:
            self._repeat(key, lambda: self._call("rm_file", self._path(key)))
        except FileNotFoundError:
            return

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete objects, many with one request. Another process may have deleted some of them."""
        paths = [self._path(key) for key in keys]
        for first in range(0, len(paths), DELETED_AT_ONCE):
            some = paths[first : first + DELETED_AT_ONCE]
            with suppress(FileNotFoundError):
                self._repeat("", partial(self._call, "rm", some))

    def delete_all(self, key: str) -> None:
        """Delete all objects below a key."""
        self.delete_many(self.find(key))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _call(self, method: str, *args: Any, size: int = 0, **kwargs: Any) -> Any:
        from fsspec.asyn import sync

        self.on_request()
        if not self._fs.async_impl:
            return getattr(self._fs, method)(*args, **kwargs)
        limit = REQUEST_SECONDS + SECONDS_PER_GB * size / 2**30
        return sync(self._fs.loop, getattr(self._fs, f"_{method}"), *args, timeout=limit, **kwargs)

    def _repeat(self, key: str, request: Callable[[], ResultT]) -> ResultT:
        """Make a request until it is answered, at most ATTEMPTS times."""
        for attempt in range(ATTEMPTS):
            if attempt:
                # Processes that failed together must not repeat their requests together.
                time.sleep(FIRST_PAUSE * 2 ** (attempt - 1) * (0.5 + 0.5 * os.urandom(1)[0] / 255))
            try:
                return request()
            except _NOT_REPEATED as answer:
                raise type(answer)(f"{self.url}/{key}: {_without_secrets(answer)}") from None
            except Exception as error:  # libraries raise errors of many types for a connection that fails
                failed = error
        reason = _without_secrets(failed) or type(failed).__name__
        raise OSError(f"{self.url}/{key}: {reason} (after {ATTEMPTS} attempts)") from None


def _open(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it."""
    protocol = url.partition("://")[0]
    try:
        import fsspec

        options: dict[str, Any] = {"use_listings_cache": False}
        if protocol in ("s3", "s3a"):
            # Attempts are repeated here only, so that their number and time are limited.
            timeouts = {"connect_timeout": 10, "read_timeout": REQUEST_SECONDS}
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **timeouts}
        fs, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        package = "'lockstep-rl[cloud]'" if protocol in ("s3", "s3a") else PACKAGES.get(protocol)
        fix = f"pip install {package}" if package else "Use s3://, gs://, az:// or another fsspec protocol."
        raise ConfigError(f"{url} cannot be opened: {error}.", fix) from None
    if hasattr(fs, "retries"):
        fs.retries = 1
    return fs, str(root).rstrip("/")


def _without_secrets(error: Exception) -> str:
    text = str(error)
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return text
