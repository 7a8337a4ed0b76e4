"""What the always-on check costs: the share of run time spent comparing fingerprints, at the default interval.

python benchmarks/consistency_check_overhead.py
"""

import os
import statistics
import tempfile
from pathlib import Path

from lockstep.io.jsonl import METRICS, read_jsonl
from lockstep.launch.launcher import launch_captured

RUNS = {
    "gym-ppo (MLP)": ["gym-ppo", "run.total_samples=40000", "run.log_every=4000"],
    "snake-ppo on 6x6 (CNN)": ["snake-ppo", "task.size=6", "run.total_samples=131072", "run.log_every=16384"],
}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        for index, (name, words) in enumerate(RUNS.items()):
            place = [f"run.runs_dir={directory}", f"run.name={index}", "run.eval_every=none"]
            problem = launch_captured(["train", *words, *place], 2)
            assert not problem, problem
            lines = [line for line in read_jsonl(Path(directory) / str(index) / METRICS) if "time/global_fps" in line]
            # The first interval compiles kernels and warms caches.
            shares = [line.get("time/check", 0.0) for line in lines[1:]]
            print(f"{name}: {statistics.mean(shares):.3%} of run time, 2 processes, {len(shares)} intervals")


if __name__ == "__main__":
    main()
