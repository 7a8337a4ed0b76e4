"""Progress of several runs: one line in a terminal that is updated, otherwise plain lines from time to time."""

import sys
import time
from contextlib import suppress

from rich.status import Status

from lockstep.io.printable import write_text
from lockstep.io.rich_console import PrintableConsole

PLAIN_SECONDS = 30.0
"""Seconds between two progress lines in a file or pipe."""


class RunsProgress:
    """Shows events as lines, and the state of all runs as a line that changes."""

    def __init__(self) -> None:
        self._console = PrintableConsole(stderr=True)
        self._status: Status | None = None
        self._printed = time.monotonic()

    def event(self, text: str) -> None:
        """Print a line that stays."""
        if self._status is not None:  # the line would be written over the spinner
            self._status.stop()
        with suppress(OSError):  # output may be a file on a full disk
            write_text(sys.stderr, f"{text}\n")
        if self._status is not None:
            self._status.start()

    def update(self, text: str) -> None:
        """Show the state of the runs."""
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            self.event(text)

    def stop(self) -> None:
        """Remove the line that changes."""
        if self._status is not None:
            self._status.stop()
            self._status = None
