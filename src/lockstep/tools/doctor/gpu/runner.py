"""Run the steps of the kit in order, each in a process with a time limit, and update the report after each."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.io.safe_read import UnreadableFileError, read_json
from lockstep.io.temporary_directory import temporary_directory
from lockstep.tools.doctor.gpu.process import run
from lockstep.tools.doctor.gpu.report import GpuReport
from lockstep.tools.doctor.gpu.steps import MACHINE, KitStep, steps_for
from lockstep.tools.doctor.gpu.summary import summarize
from lockstep.tools.doctor.gpu.worker import KIT

MINUTES = 14.5
"""Time limit of the whole kit, so that it ends within 15 minutes. Steps for which no time is left are skipped."""
_SHORTEST = 20.0
"""Seconds that must be left for a step to start."""

Tell = Callable[[str], None]


def run_kit(path: Path, quick: bool, tell: Tell) -> GpuReport:
    """Run every step that applies to this machine's GPUs. `tell` is called with a line for every step."""
    report = GpuReport(path, quick)
    with temporary_directory("gpu") as scratch:
        kit = Kit(report, scratch, tell)
        kit.run_steps([MACHINE])
        kit.gpus = len(report.found("machine").get("gpus", ()))
        if kit.gpus:
            kit.run_steps(steps_for(kit.gpus, quick))
    report.finished = kit.gpus > 0
    report.summary = summarize(report)
    report.write()
    return report


class Kit:
    """Settings common to all steps: scratch directory, number of GPUs and deadline."""

    def __init__(self, report: GpuReport, scratch: Path, tell: Tell, minutes: float = MINUTES) -> None:
        self.report, self.scratch, self.tell = report, scratch, tell
        self.gpus = 0
        self._deadline = time.monotonic() + 60 * minutes

    def run_steps(self, steps: Iterable[KitStep]) -> None:
        """Run steps in order. An interrupt is recorded in the report before it is raised."""
        for step in steps:
            left = self._deadline - time.monotonic()
            if left < _SHORTEST:
                self._finish(step, "skipped", "no time left for this step", {}, 0.0)
                continue
            began = time.monotonic()
            path = self.scratch / f"{len(self.report.steps)}.json"
            kit = {"result": str(path), "gpus": self.gpus, "quick": self.report.quick, "scratch": str(self.scratch)}
            # PYTHONFAULTHANDLER prints the stack on a native crash.
            environment = os.environ | {KIT: json.dumps(kit), "PYTHONFAULTHANDLER": "1"}
            try:
                ended = run([sys.executable, *step.words], environment, min(step.limit, left))
            except KeyboardInterrupt:
                self._finish(step, "failed", "interrupted by the user", _read(path)["found"], time.monotonic() - began)
                raise
            written = _read(path)
            result, reason = written["result"], written["reason"]
            if ended.code is None and left < step.limit:
                result = "skipped"
                reason = f"stopped after {ended.seconds:.0f} s: the {MINUTES} minutes of the kit were over"
            elif ended.problem or not result:
                result, reason = "failed", ended.problem or "the step ended without a result"
            output = ended.output if result == "failed" else ""
            self._finish(step, result, reason, written["found"], ended.seconds, output)

    def _finish(self, step: KitStep, result: str, reason: str, found: Any, seconds: float, output: str = "") -> None:
        record = {"name": step.name, "result": result, "reason": reason[:1000], "seconds": round(seconds, 2)}
        record |= {"limit": step.limit, "found": found}
        self.report.steps.append(record | ({"output": output.splitlines()} if output else {}))
        self.report.write()
        why = f"  {reason}" if reason else ""
        self.tell(f"{step.name:22} {result:8} {seconds:6.1f} s  (total {self.report.seconds:5.0f} s){why[:120]}")


def _read(path: Path) -> dict[str, Any]:
    """Read the result file of a step. A missing or unreadable file counts as an empty result."""
    empty: dict[str, Any] = {"result": "", "reason": "", "found": {}}
    try:
        written = read_json(path)
    except (FileNotFoundError, UnreadableFileError):
        return empty
    return empty | written if isinstance(written, dict) else empty
