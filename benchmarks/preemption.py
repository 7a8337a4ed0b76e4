"""Does a run that is asked to stop keep its word? The seconds it took to stop, beside the bound it printed.

    python benchmarks/preemption.py [--rounds 2]

A request reaches the launcher, or one of two processes, in the middle of collection, of an evaluation and of a save.
The clock starts when the bound is printed and stops when the status file says that the run was preempted.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep.io.jsonl import read_status

PHASES = {"collection": "collect:20", "evaluation": "evaluate:2", "save": "save:3"}
RUNS = {
    "gym-ppo": ["--smoke", "algo.rollout_steps=64", "algo.batch_size=256", "run.save_every=4096"],
    "snake-ppo": [
        "--smoke",
        "task.num_envs=256",
        "algo.rollout_steps=64",
        "algo.batch_size=2048",
        "run.save_every=32768",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    rounds, over = parser.parse_args().rounds, 0
    for recipe, words in RUNS.items():
        for phase, moment in PHASES.items():
            for place, whom in (("the launcher", ":launcher"), ("a process", "")):
                for _ in range(rounds):
                    bound, took = _stop([recipe, *words], f"1:{moment}:SIGTERM{whom}")
                    over += took > bound
                    print(f"{recipe}, {phase}, to {place}: {took:.2f} s, within about {bound:.1f} s", flush=True)
    print(f"beyond the bound: {over}")


def _stop(words: list[str], request: str) -> tuple[float, float]:
    """The bound that was printed, and the seconds it took."""
    with tempfile.TemporaryDirectory() as directory:
        line = [
            *words,
            "run.total_samples=100000000",
            "run.eval_every=16384",
            f"run.runs_dir={directory}",
            "run.name=run",
        ]
        run = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "train", *line, "--procs", "2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "LOCKSTEP_FAULT_INJECTION": "1", "LOCKSTEP_INJECT_FAULT": request},
        )
        assert run.stderr is not None
        for words_said in run.stderr:
            if found := re.search(r"within ([\d.]+) s", words_said):
                break
        asked = time.monotonic()
        while read_status(Path(directory) / "run")["state"] != "preempted":
            time.sleep(0.002)
        took = time.monotonic() - asked
        run.communicate()
        return float(found[1]), took


if __name__ == "__main__":
    main()
