"""Collectives under way: what to wait for, and word of who waits in which one."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Waiting(Protocol):
    """A reduction under way; its tensor holds the sum after `wait`."""

    def wait(self) -> Any: ...


class Nothing:
    """A reduction over one process: there is nothing to wait for."""

    def wait(self) -> None: ...


class Wait(NamedTuple):
    """The collective a process stands at."""

    number: int
    name: str
    since: float


class LostPeer(RuntimeError):
    """Another process went away during a collective. It knows why; this one only that."""


class Ledger:
    """The collectives of one process, counted, so that others can be told which of them it has come to."""

    def __init__(self) -> None:
        self.begun = 0
        self.last = ""
        self.now: Wait | None = None
        """The one it waits in, if it waits."""
        self.waited = 0.0
        """Seconds in all."""

    def begin(self, name: str) -> int:
        self.begun += 1
        self.last = name
        return self.begun

    def wait(self, number: int, name: str, action: Callable[[], T]) -> T:
        """Do what waits for the others, and let it be known meanwhile."""
        wait = self.now = Wait(number, name, time.monotonic())
        try:
            return action()
        except RuntimeError as error:
            if any(words in str(error) for words in _BROKEN):
                raise LostPeer(f"another process went away in collective {number} ('{name}'): {error}") from error
            raise
        finally:
            self.waited += time.monotonic() - wait.since
            self.now = None


class Noted:
    """A collective under way whose wait is written down."""

    __slots__ = ("_ledger", "_name", "_number", "_work")

    def __init__(self, ledger: Ledger, name: str, work: Waiting) -> None:
        self._ledger, self._name, self._work = ledger, name, work
        self._number = ledger.begin(name)

    def wait(self) -> None:
        self._ledger.wait(self._number, self._name, self._work.wait)


_BROKEN = ("onnection closed", "onnection reset", "onnection refused", "roken pipe", "imed out", "emote process exited")
"""How gloo and NCCL say that the other end is gone."""
