"""Status of work that has no output yet: a spinner in a terminal, otherwise a line every few seconds."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from lockstep.io.printable import write_text

STATUS_SECONDS = 1.0
"""Seconds between two lines in a file or pipe. The interval grows after half a minute, so that logs stay short."""


class StatusLine:
    """Shows a text and the elapsed seconds on standard error, from a thread, until it is stopped."""

    def __init__(self) -> None:
        self._text: Callable[[], str] = str
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, text: str | Callable[[], str]) -> None:
        """Show a text, or what a function returns, from now on."""
        self.stop()
        self.update(text)
        self._stopped.clear()
        show = self._spin if sys.stderr.isatty() else self._print
        self._thread = threading.Thread(target=show, args=(time.monotonic(),), name="status", daemon=True)
        self._thread.start()

    def update(self, text: str | Callable[[], str]) -> None:
        """Change the text."""
        self._text = text if callable(text) else lambda: text

    @property
    def text(self) -> Callable[[], str]:
        """Function that returns the current text."""
        return self._text

    def stop(self) -> None:
        """Remove the status. No effect if none is shown."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopped.set()
            thread.join()

    def _print(self, since: float) -> None:
        while not self._stopped.wait(max(STATUS_SECONDS, (time.monotonic() - since) / 30)):
            with suppress(OSError):  # output may go to a file on a full disk
                write_text(sys.stderr, f"lockstep: {self._line(since)}\n")

    def _spin(self, since: float) -> None:
        from lockstep.io.rich_console import PrintableConsole

        with PrintableConsole(stderr=True).status(self._line(since)) as status:
            while not self._stopped.wait(0.5):
                status.update(self._line(since))

    def _line(self, since: float) -> str:
        return f"{self._text()}, {time.monotonic() - since:.0f} s"


STARTUP = StatusLine()
"""Status of this command until its first output."""
