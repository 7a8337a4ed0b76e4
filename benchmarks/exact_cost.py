"""What exact reduction costs: an iteration in exact mode against one in fast mode, in turns; Snake's CNN, 8 lanes.

python benchmarks/exact_cost.py
"""

import statistics

import torch
from workload import CNN, recipe

from lockstep.distributed import Runtime
from lockstep.launch.device import disable_malloc_trim
from lockstep.tools.bench.measure import IterationTimer


def main(rounds=5):
    disable_malloc_trim()
    torch.set_num_threads(1)
    meters = {}
    for reduction in ("fast", "exact"):
        chosen = recipe(CNN, run_reduction=reduction, run_lanes=8)
        meters[reduction] = IterationTimer(chosen, Runtime.single_process(chosen.run))
    seconds = {name: [] for name in meters}
    for _ in range(rounds):
        for name, meter in meters.items():
            seconds[name].append(meter.seconds(meter.iterate)[0])
    fast, exact = (statistics.median(seconds[name]) for name in ("fast", "exact"))
    print(f"fast {fast:.2f} CPU s an iteration, exact {exact:.2f}: exact costs {exact / fast:.2f}x")


if __name__ == "__main__":
    main()
