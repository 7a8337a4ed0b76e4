"""Seconds from a command to its first update, from a kill to the next update, and of a proof; versions in turns.

    python benchmarks/startup.py --versions before=/path/to/src after=src --rounds 5
    python benchmarks/startup.py --versions after=src --measures start-4 recovery-4

Each round measures every version once, so that other load on the machine affects all alike. Prints medians and the
ratio to the first version.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def command(source: Path, words: list[str]) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep", *words],
        env=environment,
        cwd="/tmp",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_line(process: subprocess.Popen, path: Path, more_than: int) -> None:
    """Wait until a run has logged another iteration."""
    while (now := lines(path)) <= more_than:
        more_than = min(more_than, now)  # a restart cuts off what comes after its checkpoint
        if process.poll() is not None:
            raise SystemExit(f"the command ended with {process.returncode}:\n{process.stderr.read().decode()}")
        time.sleep(0.02)


def train(runs: Path, processes: int) -> list[str]:
    words = ["train", "gym-ppo", "--smoke", "--procs", str(processes), f"run.runs_dir={runs}", "run.name=run"]
    words += ["run.total_samples=100000000", "run.record_video=false", "run.eval_every=none", "run.log_every=1"]
    words += ["run.save_every=100000000"]
    return [*words, "run.lanes=32", "task.num_envs=32", "algo.batch_size=256"] if processes > 8 else words


def workers(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that have started no others: workers, but neither the launcher nor its fork server."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended since
            found += [] if child.children() else [child]
    return found


def proportional_memory(processes: list[psutil.Process]) -> float:
    """Memory in MB of some processes, what they share counted once (PSS)."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def measure_training(source: Path, processes: int, kill: bool) -> dict[str, float]:
    """Seconds to the first update; with `kill`, from SIGKILL of one worker to the next update; memory of all."""
    with tempfile.TemporaryDirectory() as runs:
        began = time.perf_counter()
        process = command(source, train(Path(runs), processes))
        log = Path(runs) / "run" / "metrics.jsonl"
        try:
            wait_for_line(process, log, 0)
            found = {"start": time.perf_counter() - began}
            parent = psutil.Process(process.pid)
            found["memory"] = proportional_memory([parent, *parent.children(recursive=True)])
            if kill:
                time.sleep(3)
                victims = workers(process)
                before = {worker.pid for worker in victims}
                began = time.perf_counter()
                victims[-1].send_signal(signal.SIGKILL)
                while not (now := {worker.pid for worker in workers(process)}) or now & before:
                    time.sleep(0.02)  # all of them are new when training continues
                wait_for_line(process, log, lines(log))
                found["recovery"] = time.perf_counter() - began
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.5)
        return found


def measure_proof(source: Path) -> dict[str, float]:
    began = time.perf_counter()
    process = command(source, ["prove", "gym-ppo", "--procs", "1", "2", "3", "4", "--kill"])
    if process.wait():
        raise SystemExit(process.stderr.read().decode())
    return {"proof": time.perf_counter() - began}


MEASURES = {
    "start-4": lambda source: measure_training(source, 4, kill=False),
    "start-32": lambda source: measure_training(source, 32, kill=False),
    "recovery-4": lambda source: measure_training(source, 4, kill=True),
    "proof": measure_proof,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", required=True, metavar="NAME=SRC")
    parser.add_argument("--measures", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    versions = {name: Path(path) for name, _, path in (version.partition("=") for version in given.versions)}
    for measure in given.measures:
        found: dict[str, dict[str, list[float]]] = {}
        for round_ in range(given.rounds):
            order = list(versions) if round_ % 2 == 0 else list(reversed(versions))
            for name in order:
                for what, value in MEASURES[measure](versions[name]).items():
                    found.setdefault(what, {}).setdefault(name, []).append(value)
        for what, by_version in found.items():
            medians = {name: statistics.median(values) for name, values in by_version.items()}
            first = next(iter(versions))
            row = {name: round(value, 2) for name, value in medians.items()}
            ratios = {f"{name}/{first}": round(value / medians[first], 3) for name, value in medians.items()}
            print(json.dumps({"measure": measure, "what": what, **row, **ratios, "rounds": given.rounds}), flush=True)


if __name__ == "__main__":
    main()
