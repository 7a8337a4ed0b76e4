"""Report file of the kit: one redacted JSON object, atomically replaced after every step."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.tools.doctor.redaction import scrub

FORMAT = 1
"""Version of the file's layout."""


class GpuReport:
    """Results of the kit so far, and the file that contains them."""

    def __init__(self, path: Path, quick: bool) -> None:
        self.path, self.quick = path, quick
        self.steps: list[dict[str, Any]] = []
        self.summary: list[str] = []
        self.finished = False
        self._began = time.monotonic()
        self._date = datetime.now(UTC).isoformat(timespec="seconds")

    @property
    def seconds(self) -> float:
        """Seconds since the kit started."""
        return time.monotonic() - self._began

    @property
    def failed(self) -> list[str]:
        """Names of the steps that failed."""
        return [step["name"] for step in self.steps if step["result"] == "failed"]

    def found(self, name: str) -> dict[str, Any]:
        """Return the findings of a step. Empty if it has not run."""
        return next((step["found"] for step in self.steps if step["name"] == name), {})

    def write(self) -> None:
        """Replace the file atomically, so that an interrupted kit leaves a complete file."""
        whole = {
            "format": FORMAT,
            "lockstep": __version__,
            "date": self._date,
            "quick": self.quick,
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "failed": self.failed,
            "summary": self.summary,
            "steps": self.steps,
            # Read by `lockstep plan --measured`
            "shares": self.found("shares").get("shares", {}),
            "network": self.found("bandwidth").get("network"),
        }
        temporary = self.path.with_name(f".{self.path.name}.unfinished")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(scrub(whole), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
