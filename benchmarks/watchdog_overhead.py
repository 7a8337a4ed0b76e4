"""What the watchdog and the saves cost: CPU seconds of the same run with both and with neither, in turns.

python benchmarks/watchdog_overhead.py [--rounds 4]
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = {
    "gym-ppo (MLP)": ("gym_ppo", "GymPPO", ["run.total_samples=60000"]),
    "snake-ppo on 6x6 (CNN)": ("snake_ppo", "SnakePPO", ["task.size=6", "run.total_samples=131072"]),
}
BARE = """
import lockstep.recipes.{module} as base
from lockstep.checkpoint.save_interval import SaveInterval
from lockstep.distributed.watchdog import Watchdog

Watchdog._poll = lambda self: None
SaveInterval.due = property(lambda self: False)

class Bare(base.{name}): ...
"""
WHOLE = """
import lockstep.recipes.{module} as base

class Whole(base.{name}): ...
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        for title, (module, name, words) in RUNS.items():
            recipes = {}
            for kind, text in (("bare", BARE), ("whole", WHOLE)):
                recipes[kind] = Path(directory) / f"{module}_{kind}.py"
                recipes[kind].write_text(text.format(module=module, name=name))
            ratios = []
            for index in range(rounds):
                order = ["bare", "whole"] if index % 2 else ["whole", "bare"]
                seconds = {kind: _run(recipes[kind], [*words, f"run.runs_dir={directory}"]) for kind in order}
                ratios.append(seconds["whole"] / seconds["bare"])
                print(f"{title}: {seconds['bare']:.1f} s bare, {seconds['whole']:.1f} s whole", flush=True)
            print(
                f"{title}: {statistics.median(ratios) - 1:+.2%} (from {min(ratios) - 1:+.2%} to {max(ratios) - 1:+.2%})"
            )


def _run(recipe: Path, words: list[str]) -> float:
    """CPU seconds of a run on two processes, with all they started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The bare run reports no progress to its launcher, which must not take it for a hang.
    words = [*words, "run.eval_every=none", "run.collective_timeout=3600"]
    line = [sys.executable, "-m", "lockstep", "train", str(recipe), *words, "--procs", "2"]
    # Spawned workers are children of the launcher, so that their CPU time is part of the launcher's.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LOCKSTEP_START": "spawn"}
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
