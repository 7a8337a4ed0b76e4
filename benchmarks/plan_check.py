"""What a plan made on one process predicts for 2 and 4 processes of this machine, beside what they then do.

python benchmarks/plan_check.py

The shares of one process, how much slower it is beside others, and the iterations of all are taken in turns, round by
round, because this machine's own speed moves more in a minute than what is to be checked. Processes share its cores,
and the plan knows it.
"""

import statistics
import time

import torch
import torch.distributed as dist
from workload import CNN, recipe, start_again, started

from lockstep.distributed import Runtime
from lockstep.launch.device import disable_malloc_trim, threads_per_process
from lockstep.tools.bench.measure import IterationTimer, contention_and_jitter, time_contention, time_reductions
from lockstep.tools.bench.network_model import NetworkModel, fit_link
from lockstep.tools.bench.scaling_model import measure_shares, predict, slowest_of

ROUNDS = 21


def work():
    disable_malloc_trim()
    torch.set_num_threads(1)
    chosen = recipe(CNN, algo_epochs=1, run_precision="bf16", run_lanes=8, run_collective_timeout=600.0)
    with Runtime.start(chosen.run) as runtime:
        timed = time_reductions(runtime)
        link = fit_link([int(size) for size in timed], list(timed.values()), runtime.size)
        meter, seconds, crowding = IterationTimer(chosen, runtime), [], []

        def all_together():
            crowding.extend(time_contention(meter, dist.get_rank() < threads_per_process(1), times=3))
            meter.iterate()  # the others have slept while one was measured
            dist.barrier()
            began = time.perf_counter()
            meter.iterate()
            dist.barrier()
            seconds.append(time.perf_counter() - began)

        if not runtime.is_main:
            for _ in range(ROUNDS):
                all_together()
            return
        shares = measure_shares(chosen, ROUNDS, after_round=all_together)
        slower, jitter = contention_and_jitter(crowding)
        network = NetworkModel("here", 2**20, link, link, launch=0.0, contention=slower, jitter=tuple(jitter))
        said = predict(shares, runtime.size, network, 1, cores=threads_per_process(1))
        alone = predict(shares, 1, network, 1, cores=threads_per_process(1))
        slowest = slowest_of(min(runtime.size, threads_per_process(1)), jitter)
        done = meter.algorithm.samples / statistics.median(seconds)
        print(
            f"{runtime.size} processes on {threads_per_process(1)} cores: predicted {said.steps_per_second:,.0f} "
            "steps/s "
            f"({said.steps_per_second / alone.steps_per_second:.2f}x of one), measured {done:,.0f}: "
            f"{said.steps_per_second / done - 1:+.0%} (the slowest takes {slowest:.2f}x, "
            f"all at once {slower:.2f}x, waiting {said.waiting / (said.waiting + said.compute):.0%})",
            flush=True,
        )


def main():
    if started():
        work()
        return
    for processes in (2, 4):
        start_again(processes)


if __name__ == "__main__":
    main()
