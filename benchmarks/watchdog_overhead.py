"""What the checks of a running training cost: the same run with and without them, in turns of a few iterations.

python benchmarks/watchdog_overhead.py [--minutes 3]

The checks are the watchdog's polls, the heartbeats in the run directory and the question whether another start has
taken the run over. They are switched off and on within one run on two processes, because the CPU time of two whole
runs differs by more than the checks take. The CPU time of the checks themselves is counted, too.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = {
    "gym-ppo (MLP)": ("gym_ppo", "GymPPO", [], 6),
    "snake-ppo on 6x6 (CNN)": ("snake_ppo", "SnakePPO", ["task.size=6"], 1),
}
"""Recipes, their settings, and the iterations of a turn: one or two seconds here."""

RECIPE = """
import json, os, random, time
import lockstep.recipes.{module} as base
import lockstep.training_loop as loop
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.distributed import heartbeat
from lockstep.distributed.watchdog import Watchdog

turns, state = [], dict(on=True, iterations=0, checks=0.0, since=None)
order = random.Random(0)  # other work of a run happens every few iterations, which must not meet the turns

def timed(function, *otherwise):
    def call(*arguments):
        if otherwise and not state["on"]:
            return otherwise[0]
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            state["checks"] += time.thread_time() - began
    return call

# Without its directory, the watchdog neither samples heartbeats nor writes them.
Watchdog._directory = property(
    lambda self: self.__dict__.get("directory") if state["on"] else None,
    lambda self, directory: self.__dict__.update(directory=directory),
)
Watchdog._poll = timed(Watchdog._poll, None)
Watchdog._sample = timed(Watchdog._sample)
Watchdog._share_stop_request = timed(Watchdog._share_stop_request)
GenerationFence.poll = timed(GenerationFence.poll, False)
heartbeat.write = timed(heartbeat.write)
iterate = loop.iterate

def in_turns(*arguments):
    iterate(*arguments)
    state["iterations"] += 1
    if state["iterations"] % {iterations}:
        return
    now = time.process_time()
    if state["since"] is not None:
        turns.append((state["on"], now - state["since"], state["checks"]))
        state["on"] = not state["on"] if len(turns) % 2 else order.random() < 0.5
    state["checks"], state["since"] = 0.0, now
    with open(os.environ["TURNS"] + os.environ["RANK"], "w") as file:
        json.dump(turns, file)

loop.iterate = in_turns

class Turns(base.{name}): ...
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    minutes = parser.parse_args().minutes
    for title, (module, name, words, iterations) in RUNS.items():
        with tempfile.TemporaryDirectory() as directory:
            recipe = Path(directory) / "recipe.py"
            recipe.write_text(RECIPE.format(module=module, name=name, iterations=iterations))
            turns = _train(recipe, [*words, f"run.max_hours={minutes / 60}"])
        # Pairs of neighbors from both processes: with the checks, and without.
        pairs = [sorted(two, reverse=True) for each in turns for two in zip(each[0::2], each[1::2], strict=False)]
        ratios = [on[1] / off[1] for on, off in pairs]
        low, high = _interval(ratios)
        spent = sum(on[2] for on, _ in pairs) / sum(on[1] for on, _ in pairs)
        print(
            f"{title}: {statistics.median(ratios) - 1:+.2%} of CPU time (95 % interval {low - 1:+.2%} to "
            f"{high - 1:+.2%}, {len(pairs)} pairs of {statistics.median(off[1] for _, off in pairs):.1f} s); "
            f"the checks themselves took {spent:.3%}",
            flush=True,
        )


def _train(recipe: Path, words: list[str]) -> list[list[list[float]]]:
    """Train on two processes; return the turns of each: whether checks were on, CPU seconds, CPU seconds of checks."""
    words = [*words, "run.eval_every=none", "run.total_samples=1000000000", f"run.runs_dir={recipe.parent}"]
    line = [sys.executable, "-m", "lockstep", "train", str(recipe), *words, "--procs", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TURNS": str(recipe.parent / "turns")}
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = sorted(recipe.parent.glob("turns*"))
    if len(files) != 2:
        raise SystemExit(f"The run did not train:\n{done.stdout[-3000:]}")
    return [json.loads(file.read_text()) for file in files]


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


if __name__ == "__main__":
    main()
