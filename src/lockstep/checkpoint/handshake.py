"""Agreement of all processes on a save, through the store: each reports its files, the main process gives the verdict.

It runs in background threads, so it uses no collectives. The main process makes a fixed number of requests for any
number of processes: it waits for a counter, and then reads all reports at once.
"""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lockstep.distributed.kv_store import KeyValueStore, heartbeat, wait_with_heartbeat

LOOK_SECONDS = 5.0
"""Seconds after which the main process reads the heartbeats of all processes."""


class SaveHandshake:
    """Connections of one process to the store. `note_progress` is called while others are slow but alive."""

    def __init__(
        self,
        connect: Callable[[], KeyValueStore],
        rank: int,
        size: int,
        timeout: float,
        note_progress: Callable[[], None],
    ) -> None:
        self.rank, self.size, self.timeout, self._note_progress = rank, size, timeout, note_progress
        self._number = 0
        """Number of the save, the same on all processes. Its name may be that of a save that has failed before."""
        # Connect at startup, while all processes are alive: connecting to the store of a dead process blocks for long.
        self._store, self._heartbeat_store = connect(), connect()
        self._store.set(_beat(rank), "")
        self._clear_report()

    def beating(self) -> AbstractContextManager[None]:
        """Return a context in which this process sends heartbeats."""
        return heartbeat(self._heartbeat_store, _beat(self.rank), self.timeout)

    def report(self, files: dict[str, Any], problem: str) -> None:
        """Report the files that this process wrote for its next save, and why it failed, if it did."""
        self._number += 1
        self._store.set(_report(self.rank), json.dumps({"files": files, "problem": problem}))
        if self._store.add(self._count) == self.size:
            self._store.set(self._complete, "")

    def collect(self) -> tuple[dict[str, Any], list[str]]:
        """On the main process: wait for all reports; return the files and the problems of all processes."""
        # Wait as long as heartbeats arrive. No collective runs here that would detect the death of that process.
        ranks, beats, changed_at = range(self.size), [""] * self.size, [time.monotonic()] * self.size
        while not self._store.is_set(self._complete, min(self.timeout, LOOK_SECONDS)):
            now, newest = time.monotonic(), self._store.read(map(_beat, ranks))
            for rank in ranks:
                if newest[rank] != beats[rank]:
                    changed_at[rank] = now
            if newest != beats:
                self._note_progress()
            beats = newest
            if now - min(changed_at) > self.timeout:  # of a process that has reported, or is dead
                reports = self._store.read(map(_report, ranks))
                for rank in ranks:
                    if now - changed_at[rank] > self.timeout and not reports[rank]:
                        raise TimeoutError(f"process {rank} has sent no heartbeat for {self.timeout:.0f} s")
        reported = [json.loads(text) for text in self._store.read(map(_report, ranks))]
        self._store.delete([self._count, self._complete])
        files = {name: value for report in reported for name, value in report["files"].items()}
        return files, [report["problem"] for report in reported if report["problem"]]

    def announce(self, verdict: Any) -> None:
        """On the main process: tell all processes how the save ended."""
        self._store.set(self._verdict, json.dumps(verdict))
        self._clear_report()

    def verdict(self) -> Any:
        """On the other processes: wait until the main process has announced how the save ended."""
        message = f"the main process has sent no heartbeat for {self.timeout:.0f} s"
        text = wait_with_heartbeat(self._store, self._verdict, _beat(0), self.timeout, message, self._note_progress)
        self._clear_report()
        return json.loads(text)

    def _clear_report(self) -> None:
        """Without this, a process that dies before the next save would seem to have reported to it."""
        self._store.set(_report(self.rank), "")

    def forget(self) -> None:
        """On the main process, when all processes know the verdict: delete it."""
        self._store.delete([self._verdict])

    # Keys of the current save

    @property
    def _count(self) -> str:
        return f"save/number-{self._number}/reports"

    @property
    def _complete(self) -> str:
        return f"save/number-{self._number}/complete"

    @property
    def _verdict(self) -> str:
        return f"save/number-{self._number}/verdict"

    def close(self) -> None:
        """Close the connections now: at interpreter exit, objects are destroyed in an undefined order."""
        self._store.close()
        self._heartbeat_store.close()


def _beat(rank: int) -> str:
    return f"save/{rank}/beat"


def _report(rank: int) -> str:
    return f"save/{rank}/report"
