"""Two injected faults: one process is stopped, one process is killed."""

import time

from lockstep.distributed.fault_injection import SWITCH, VARIABLE
from lockstep.tools.doctor.gpu.proofs import RECIPE, as_words, proved, proved_hash, sharing
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, expect, lockstep
from lockstep.tools.doctor.smoke_test import hash_of_run

TIMEOUT = 8.0
"""Value of run.collective_timeout in the hang drill, in seconds."""
REPORT_LINES, LINE = 40, 2000
"""Lines of a hang report, and characters of a line, that are kept."""


def _words(record: ResultRecord, name: str, *more: str) -> list[str]:
    location = [f"run.runs_dir={record.scratch}", f"run.name={name}"]
    return ["train", RECIPE, "--smoke", "--procs", "2", *as_words(proved(record)), *location, *sharing(record), *more]


def hang(record: ResultRecord) -> None:
    """Stop a process with SIGSTOP. The hang report must name the process and its phase."""
    began = time.monotonic()
    ended = lockstep(
        *_words(record, "hang", "--max-restarts", "0", f"run.collective_timeout={TIMEOUT}"),
        **{SWITCH: "1", VARIABLE: "1:learn:2:SIGSTOP"},
    )
    seconds = time.monotonic() - began
    path = record.scratch / "hang" / "hang.txt"
    if not path.exists():
        raise Failure(f"process 1 was stopped, but there is no hang report ({ended.problem or 'the run succeeded'})")
    report = path.read_text(errors="replace")
    record.add("seconds", round(seconds, 1))
    record.add("timeout", TIMEOUT)
    record.add("report", [line[:LINE] for line in report.splitlines()[:REPORT_LINES]])
    missing = [phrase for phrase in ("process 1 on ", "phase ", "collective") if phrase not in report]
    if missing:
        raise Failure(f"the hang report does not contain: {', '.join(missing)}")


def kill(record: ResultRecord) -> None:
    """Kill a process. The run must restart and end with the hash of a run without faults."""
    exact = "run.reduction=exact"
    wanted = proved_hash(record.scratch)
    if wanted is None:
        expect(lockstep(*_words(record, "undisturbed", exact)), "the run without faults")
        wanted = hash_of_run(record.scratch / "undisturbed")
    ended = lockstep(*_words(record, "killed", exact, "--max-restarts", "1"), **{SWITCH: "1", VARIABLE: "1:learn:3"})
    expect(ended, "the run whose process 1 was killed")
    if "Starting again from the last checkpoint" not in ended.output:
        raise Failure("the process was not killed: the run did not restart")
    found = hash_of_run(record.scratch / "killed")
    record.add("hashes", {"undisturbed": wanted, "killed": found})
    if found != wanted:
        raise Failure("the run that was killed and restarted differs in its hash from the run without faults")
