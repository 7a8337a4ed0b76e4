"""Words between processes that are not collectives: a key-value store, or a dict for a process alone."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from lockstep.launch.private_store import is_private, wait_for


class KeyValueStore(Protocol):
    """Where background threads leave word for each other. A thread needs a mailbox of its own."""

    def set(self, key: str, text: str) -> None: ...
    def wait(self, key: str, seconds: float) -> str:
        """The text under a key, once somebody has posted it; TimeoutError when nobody does in time."""

    def delete(self, keys: Iterable[str]) -> None: ...


class InMemoryStore:
    """The mailbox of a process that is alone."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, text: str) -> None:
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    def wait(self, key: str, seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._texts, seconds):
                raise TimeoutError(f"nobody posted {key} within {seconds:.0f} s")
            return self._texts[key]

    def delete(self, keys: Iterable[str]) -> None:
        with self._changed:
            for key in keys:
                self._texts.pop(key, None)


class TorchStore:
    """A mailbox on torch's store."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._polls = store, is_private(store)

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def wait(self, key: str, seconds: float) -> str:
        try:
            if not self._polls:
                self._store.wait([key], timedelta(seconds=seconds))
            elif not wait_for(self._store, key, seconds):
                raise dist.DistStoreError("Wait timeout")
        except dist.DistStoreError as error:
            raise TimeoutError(f"nobody posted {key} within {seconds:.0f} s") from error
        return self._store.get(key).decode()

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.delete_key(key)


@contextmanager
def heartbeat(mailbox: KeyValueStore, key: str, patience: float) -> Any:
    """Post a growing number under a key while the block runs, several times within the patience of those who wait."""
    finished = threading.Event()

    def beat() -> None:
        count = 0
        while not finished.wait(min(5.0, patience / 4)):
            count += 1
            mailbox.set(key, str(count))

    thread = threading.Thread(target=beat, daemon=True)
    mailbox.set(key, "0")
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def wait_with_heartbeat(
    mailbox: KeyValueStore,
    key: str,
    beat: str,
    patience: float,
    silence: str,
    on_beat: Callable[[], None] = lambda: None,
) -> str:
    """Wait for a text however long it takes, as long as the heartbeat goes on; then TimeoutError, with those words."""
    last, since = "", time.monotonic()
    while True:
        try:
            return mailbox.wait(key, min(patience, 5.0))
        except TimeoutError:
            try:
                now = mailbox.wait(beat, 0.1)
            except TimeoutError:
                now = last
            if now != last:
                last, since = now, time.monotonic()
                on_beat()
            elif time.monotonic() - since > patience:
                raise TimeoutError(silence) from None
