"""Two injected faults: one process is stopped, one process is killed."""

import time

from lockstep.distributed.fault_injection import SWITCH, VARIABLE
from lockstep.tools.doctor.gpu.proofs import RECIPE, as_args, proof_settings, proved_hash, share_gpu_args
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, expect, lockstep
from lockstep.tools.doctor.smoke_test import hash_of_run

TIMEOUT = 8.0
"""Value of run.collective_timeout in the hang drill, in seconds."""
REPORT_LINES, LINE_CHARACTERS = 40, 2000
"""Lines of a hang report, and characters of a line, that are kept."""


def _train_args(record: ResultRecord, name: str, *more: str) -> list[str]:
    settings = [*as_args(proof_settings(record)), *share_gpu_args(record)]
    settings += [f"run.runs_dir={record.scratch}", f"run.name={name}"]
    return ["train", RECIPE, "--smoke", "--procs", "2", *settings, *more]


def hang(record: ResultRecord) -> None:
    """Stop a process with SIGSTOP. The hang report must name the process and its phase."""
    start = time.monotonic()
    args = _train_args(record, "hang", "--max-restarts", "0", f"run.collective_timeout={TIMEOUT}")
    result = lockstep(*args, **{SWITCH: "1", VARIABLE: "1:learn:2:SIGSTOP"})
    seconds = time.monotonic() - start
    path = record.scratch / "hang" / "hang.txt"
    if not path.exists():
        raise Failure(f"process 1 was stopped, but there is no hang report ({result.problem or 'the run succeeded'})")
    report = path.read_text(errors="replace")
    record.add("seconds", round(seconds, 1))
    record.add("timeout", TIMEOUT)
    record.add("report", [line[:LINE_CHARACTERS] for line in report.splitlines()[:REPORT_LINES]])
    missing = [text for text in ("process 1 on ", "phase ", "collective") if text not in report]
    if missing:
        raise Failure(f"the hang report does not contain: {', '.join(missing)}")


def kill(record: ResultRecord) -> None:
    """Kill a process. The run must restart and end with the hash of a run without faults."""
    exact = "run.reduction=exact"
    expected = proved_hash(record.scratch)
    if expected is None:
        expect(lockstep(*_train_args(record, "undisturbed", exact)), "the run without faults")
        expected = hash_of_run(record.scratch / "undisturbed")
    args = _train_args(record, "killed", exact, "--max-restarts", "1")
    result = lockstep(*args, **{SWITCH: "1", VARIABLE: "1:learn:3"})
    expect(result, "the run whose process 1 was killed")
    if "Starting again from the last checkpoint" not in result.output:
        raise Failure("the process was not killed: the run did not restart")
    found = hash_of_run(record.scratch / "killed")
    record.add("hashes", {"undisturbed": expected, "killed": found})
    if found != expected:
        raise Failure("the run that was killed and restarted differs in its hash from the run without faults")
