"""Two planted faults: a process that is stopped, and one that is killed."""

import time

from lockstep.tools.doctor.gpu.proofs import RECIPE, as_words, proved, proved_hash
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, expect, lockstep

SWITCH, KILL = "LOCKSTEP_FAULT_INJECTION", "LOCKSTEP_INJECT_FAULT"
"""Those of `lockstep.distributed.fault_injection`, which cannot be imported without torch."""
TIMEOUT = 8.0
"""Setting run.collective_timeout of the hang drill: seconds that processes wait for one that does not come."""
REPORT_LINES, LINE = 40, 2000
"""Lines of a hang report, and characters of a line, that are kept."""


def _words(record: ResultRecord, name: str, *more: str) -> list[str]:
    sharing = [] if record.gpus > 1 else ["run.share_gpu=true"]
    place = [f"run.runs_dir={record.scratch}", f"run.name={name}"]
    return ["train", RECIPE, "--smoke", "--procs", "2", *as_words(proved(record)), *place, *sharing, *more]


def hang(record: ResultRecord) -> None:
    """Stop a process by SIGSTOP: the hang report must name it and its phase."""
    began = time.monotonic()
    ended = lockstep(
        *_words(record, "hang", "--max-restarts", "0", f"run.collective_timeout={TIMEOUT}"),
        **{SWITCH: "1", KILL: "1:learn:2:SIGSTOP"},
    )
    seconds = time.monotonic() - began
    path = record.scratch / "hang" / "hang.txt"
    if not path.exists():
        raise Failure(f"process 1 was stopped, and there is no hang report ({ended.problem or 'the run ended well'})")
    report = path.read_text(errors="replace")
    record.add("seconds", round(seconds, 1))
    record.add("timeout", TIMEOUT)
    record.add("report", [line[:LINE] for line in report.splitlines()[:REPORT_LINES]])
    missing = [words for words in ("process 1 on ", "phase ", "collective") if words not in report]
    if missing:
        raise Failure(f"the hang report does not contain: {', '.join(missing)}")


def kill(record: ResultRecord) -> None:
    """Kill a process: the run must restart and end with the hash of an undisturbed run."""
    from lockstep.tools.doctor.smoke_test import hash_of_run

    exact = "run.reduction=exact"
    wanted = proved_hash(record.scratch)
    if wanted is None:
        expect(lockstep(*_words(record, "undisturbed", exact)), "the undisturbed run")
        wanted = hash_of_run(record.scratch / "undisturbed")
    ended = lockstep(*_words(record, "killed", exact, "--max-restarts", "1"), **{SWITCH: "1", KILL: "1:learn:3"})
    expect(ended, "the run whose process 1 was killed")
    if "Starting again from the last checkpoint" not in ended.output:
        raise Failure("the kill did not strike: the run did not restart")
    found = hash_of_run(record.scratch / "killed")
    record.add("hashes", {"undisturbed": wanted, "killed": found})
    if found != wanted:
        raise Failure("the run that was killed and restarted has another hash than the undisturbed one")
