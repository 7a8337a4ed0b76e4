"""How soon a run goes on after a kill: from the kill of one of four processes to the next update, beside a bare start.

    python benchmarks/recovery.py [--rounds 5]

A bare start is the same command from its first moment to its first update; both are timed in turns, and both end when
an iteration is first logged. Prints seconds, their medians, the ratio, and the work that was lost.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from lockstep.checkpoint.lineage import list_checkpoints
from lockstep.io.jsonl import METRICS, read_jsonl

ITERATION = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    starts, recoveries, lost = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for index in range(rounds):
            path = Path(directory) / str(index)
            began = time.monotonic()
            command = _start(path)
            _wait(path, 0)
            starts.append(time.monotonic() - began)
            _wait(path, 40 * ITERATION)
            victim = psutil.Process(command.pid).children()[index % 4]
            before = _logged(path)
            killed = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            seen = _generation(path)
            while _generation(path) == seen or _logged(path) <= _resumed_at(path):
                time.sleep(0.02)
            recoveries.append(time.monotonic() - killed)
            lost.append((before - _resumed_at(path)) // ITERATION)
            command.terminate()
            command.wait()
            ratio = recoveries[-1] / starts[-1]
            print(
                f"start {starts[-1]:.1f} s, recovery {recoveries[-1]:.1f} s ({ratio:.2f}x), lost {lost[-1]} iterations"
            )
    start, recovery = statistics.median(starts), statistics.median(recoveries)
    print(f"median: start {start:.1f} s, recovery {recovery:.1f} s, {recovery / start:.2f}x; lost at most {max(lost)}")


def _start(path: Path) -> "subprocess.Popen[bytes]":
    words = [
        "snake-ppo",
        "--smoke",
        "run.total_samples=100000000",
        f"run.save_every={8 * ITERATION}",
        "run.eval_every=none",
    ]
    words += [f"run.log_every={ITERATION}", "algo.rollout_steps=16", "algo.batch_size=128", "task.num_envs=16"]
    words += [f"run.runs_dir={path.parent}", f"run.name={path.name}"]
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "train", *words, "--procs", "4"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def _wait(path: Path, samples: int) -> None:
    while _logged(path) <= samples:
        time.sleep(0.02)


def _logged(path: Path) -> int:
    lines = read_jsonl(path / METRICS)
    return int(lines[-1]["samples"]) if lines else 0


def _generation(path: Path) -> int:
    return len(list((path / "checkpoints").glob("attempt-*.json")))


def _resumed_at(path: Path) -> int:
    """The samples of the checkpoint that the newest start went on from."""
    generation = _generation(path)
    older = [name.samples for name in list_checkpoints(path / "checkpoints") if name.generation < generation]
    return max(older, default=0)


if __name__ == "__main__":
    main()
