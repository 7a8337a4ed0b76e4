"""Run the steps of the kit in order, each in a process with a time limit, and write the report file after each."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.io.safe_read import UnreadableFileError, read_json
from lockstep.io.temporary_directory import temporary_directory
from lockstep.tools.doctor.gpu.process import run
from lockstep.tools.doctor.gpu.steps import MACHINE, KitStep, steps_for
from lockstep.tools.doctor.gpu.summary import found_by, summarize
from lockstep.tools.doctor.gpu.worker import KIT
from lockstep.tools.doctor.redaction import scrub

MINUTES = 14.5
"""Time limit of the whole kit, so that it ends within 15 minutes. Steps for which no time is left are skipped."""
FORMAT = 1
"""Version of the layout of the report file."""
_MIN_STEP_SECONDS = 20.0
"""Seconds that must be left for a step to start."""

Callback = Callable[[str], None]


def run_kit(path: Path, quick: bool, report_line: Callback) -> "Kit":
    """Run every step that applies to this machine's GPUs. `report_line` is called with a line for every step."""
    with temporary_directory("gpu") as scratch:
        kit = Kit(path, quick, scratch, report_line)
        kit.run_steps([MACHINE])
        kit.gpus = len(found_by(kit.steps, "machine").get("gpus", ()))
        if kit.gpus:
            kit.run_steps(steps_for(kit.gpus, quick))
    kit.finished = kit.gpus > 0
    kit.summary = summarize(kit.steps)
    kit.write()
    return kit


class Kit:
    """One run of the kit: its results so far, and the report file that contains them."""

    def __init__(self, path: Path, quick: bool, scratch: Path, report_line: Callback, minutes: float = MINUTES) -> None:
        self.path, self.quick, self.scratch, self.report_line = path, quick, scratch, report_line
        self.gpus = 0
        self.steps: list[dict[str, Any]] = []
        self.summary: list[str] = []
        self.finished = False
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.monotonic()
        self._deadline = self._start + 60 * minutes

    @property
    def seconds(self) -> float:
        """Seconds since the kit started."""
        return time.monotonic() - self._start

    @property
    def failed(self) -> list[str]:
        """Names of the steps that failed."""
        return [step["name"] for step in self.steps if step["result"] == "failed"]

    def run_steps(self, steps: Iterable[KitStep]) -> None:
        """Run steps in order. An interrupt is recorded in the report before it is raised."""
        for step in steps:
            remaining = self._deadline - time.monotonic()
            if remaining < _MIN_STEP_SECONDS:
                self._finish(step, "skipped", "no time left for this step", {}, 0.0)
                continue
            start = time.monotonic()
            path = self.scratch / f"{len(self.steps)}.json"
            kit = {"result": str(path), "gpus": self.gpus, "quick": self.quick, "scratch": str(self.scratch)}
            # PYTHONFAULTHANDLER prints the stack on a native crash.
            environment = os.environ | {KIT: json.dumps(kit), "PYTHONFAULTHANDLER": "1"}
            try:
                outcome = run([sys.executable, *step.args], environment, min(step.limit, remaining))
            except KeyboardInterrupt:
                self._finish(step, "failed", "interrupted by the user", _read(path)["found"], time.monotonic() - start)
                raise
            record = _read(path)
            result, reason = record["result"], record["reason"]
            if outcome.code is None and remaining < step.limit:
                result = "skipped"
                reason = f"stopped after {outcome.seconds:.0f} s: the {MINUTES} minutes of the kit were over"
            elif outcome.problem or not result:
                result, reason = "failed", outcome.problem or "the step ended without a result"
            output = outcome.output if result == "failed" else ""
            self._finish(step, result, reason, record["found"], outcome.seconds, output)

    def _finish(self, step: KitStep, result: str, reason: str, found: Any, seconds: float, output: str = "") -> None:
        record = {"name": step.name, "result": result, "reason": reason[:1000], "seconds": round(seconds, 2)}
        record |= {"limit": step.limit, "found": found}
        self.steps.append(record | ({"output": output.splitlines()} if output else {}))
        self.write()
        why = f"  {reason}" if reason else ""
        self.report_line(f"{step.name:22} {result:8} {seconds:6.1f} s  (total {self.seconds:5.0f} s){why[:120]}")

    def write(self) -> None:
        """Write the report without names and secrets. An interrupted kit leaves a complete file."""
        report = {
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
            "shares": found_by(self.steps, "shares").get("shares", {}),
            "network": found_by(self.steps, "bandwidth").get("network"),
        }
        temporary = self.path.with_name(f".{self.path.name}.unfinished")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(scrub(report), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def _read(path: Path) -> dict[str, Any]:
    """Read the result file of a step. A missing or unreadable file counts as an empty result."""
    empty: dict[str, Any] = {"result": "", "reason": "", "found": {}}
    try:
        record = read_json(path)
    except (FileNotFoundError, UnreadableFileError):
        return empty
    return empty | record if isinstance(record, dict) else empty
