"""Key-value store for messages between processes that are not collectives."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.launch.private_store import is_private, wait_for


class KeyValueStore:
    """Key-value store for messages between background threads of different processes. Each thread needs its own."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._polls = store, is_private(store)

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def wait(self, key: str, seconds: float) -> str:
        """Wait until a process sets a key, and return its text. Raise TimeoutError after `seconds`."""
        try:
            if not self._polls:
                self._store.wait([key], timedelta(seconds=seconds))
            elif not wait_for(self._store, key, seconds):
                raise dist.DistStoreError("Wait timeout")
        except dist.DistStoreError as error:
            raise TimeoutError(f"no process set {key} within {seconds:.0f} s") from error
        return self._store.get(key).decode()

    def is_set(self, key: str, seconds: float) -> bool:
        """Wait until a process sets a key; return whether one did within `seconds`."""
        try:
            self.wait(key, seconds)
        except TimeoutError:
            return False
        return True

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of these keys are set, without waiting."""
        return bool(self._store.check(list(keys)))

    def read(self, keys: Iterable[str]) -> list[str]:
        """Return the texts of keys that are set, in one request."""
        return [value.decode() for value in self._store.multi_get(list(keys))]

    def add(self, key: str) -> int:
        """Add one to a counter and return its value."""
        return int(self._store.add(key, 1))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)

    def close(self) -> None:
        """Close the connection of this thread."""
        del self._store


@contextmanager
def heartbeat(store: KeyValueStore, key: str, timeout: float) -> Any:
    """Set a key to an increasing number while the block runs, several times within the waiters' `timeout`."""
    finished = threading.Event()

    def beat() -> None:
        count = 0
        while not finished.wait(min(5.0, timeout / 4)):
            count += 1
            store.set(key, str(count))

    thread = threading.Thread(target=beat, daemon=True)
    store.set(key, "0")
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def wait_with_heartbeat(
    store: KeyValueStore, key: str, beat: str, timeout: float, message: str, on_beat: Callable[[], None]
) -> str:
    """Wait for a key without a time limit while its heartbeat changes.

    Raise TimeoutError with `message` once the heartbeat has not changed for `timeout` seconds.
    """
    last, since = "", time.monotonic()
    while True:
        try:
            return store.wait(key, min(timeout, 5.0))
        except TimeoutError:
            now = last
            with suppress(TimeoutError):
                now = store.wait(beat, 0.1)
            if now != last:
                last, since = now, time.monotonic()
                on_beat()
            elif time.monotonic() - since > timeout:
                raise TimeoutError(message) from None
