"""Supervised throughput with loading included: two processes against one, each with its loader on one core.

    python benchmarks/loading.py [--data t20s_male_json.zip] [--rounds 3] [recipe words, such as algo.num_workers=1]

The global batch is the same. Prints examples a second and the part of the time that learners waited for a batch, both
as medians over a run's log entries but the first, in turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.io.jsonl import METRICS, read_jsonl

# A process, and all it starts, on the core of its number.
PINNED = """
import os

os.sched_setaffinity(0, {int(os.environ.get("LOCAL_RANK", "0")) % os.cpu_count()})

from lockstep.recipes.cricket_gnn import CricketGNN

class Pinned(CricketGNN): ...
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="")
    parser.add_argument("--rounds", type=int, default=3)
    arguments, words = parser.parse_known_args()
    words = [*words, f"task.data={arguments.data}"] if arguments.data else [*words, "task.num_synthetic_matches=200"]
    ratios = []
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "pinned.py"
        recipe.write_text(PINNED)
        for number in range(arguments.rounds):
            speeds = {}
            for processes in (1, 2) if number % 2 else (2, 1):
                speeds[processes], waited = _run(recipe, words, processes, f"{number}-{processes}")
                print(f"{processes} processes: {speeds[processes]:,.0f} examples/s, waited {waited:.1%}", flush=True)
            ratios.append(speeds[2] / speeds[1])
    print(f"two against one: {statistics.median(ratios):.2f}x (from {min(ratios):.2f}x to {max(ratios):.2f}x)")


def _run(recipe: Path, words: list[str], processes: int, name: str) -> tuple[float, float]:
    line = [sys.executable, "-m", "lockstep", "train", str(recipe), *words, "--procs", str(processes)]
    line += ["run.total_samples=122880", "run.log_every=20480", "run.eval_every=none"]
    line += [f"run.runs_dir={recipe.parent}", f"run.name={name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    entries = [line for line in read_jsonl(recipe.parent / name / METRICS) if "time/global_fps" in line][1:]
    return tuple(statistics.median(entry[key] for entry in entries) for key in ("time/global_fps", "time/load"))


if __name__ == "__main__":
    main()
