"""Two processes of one thread each against one: the same global batch (strong), and a doubled one (weak).

python benchmarks/scaling.py                   Snake's CNN
python benchmarks/scaling.py --precision bf16

Beside it, in the same processes and in turns, a bare loop with torch's DDP: the compiled boards, the network's forward,
and DDP's forward, backward and step on as many samples. Everything is wall time between barriers. A turn is a short
rollout with its epochs, and there are many: this machine's speed moves by half within seconds, and so the order of a
round is drawn anew each time. Medians are of ratios between turns of one round; "quiet" compares each contender's
fastest quarter, in which nobody else was at work. Two bounds go along: processes that share nothing but the machine,
and ones that need none of its memory either.
"""

import argparse
import copy
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import CNN, MLP, recipe, start_again, started

from lockstep.distributed import Runtime
from lockstep.launch.device import disable_malloc_trim
from lockstep.tools.bench.measure import IterationTimer


def timed(work):
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def ddp_loop(meter):
    """An iteration's bare work, with the learning through DDP."""
    algorithm = meter.algorithm
    env, inference, learning = algorithm.benchmark_ops()
    net = DistributedDataParallel(copy.deepcopy(algorithm.net), gradient_as_bucket_view=True)
    rate = torch.optim.Adam(net.parameters(), fused=True)
    obs = algorithm.collector.rollout["obs"].flatten(0, 1)[: learning.samples].clone()

    def iterate():
        for _ in range(env.calls_per_iteration):
            inference.run()
            env.run()
        for _ in range(learning.calls_per_iteration):
            with meter.runtime.autocast():
                outputs, value = net(obs)
            rate.zero_grad()
            (outputs.sum() + value.sum()).backward()
            rate.step()

    return iterate


def bare_loop(meter):
    works = meter.algorithm.benchmark_ops()
    return lambda: [work.run() for work in works for _ in range(work.calls_per_iteration)]


def in_cache(square):
    """Arithmetic on what fits into a core's own cache."""
    return lambda: [square @ square for _ in range(3000)]


def work(arguments):
    disable_malloc_trim()
    torch.set_num_threads(1)
    settings = (MLP if arguments.mlp else CNN) | {"algo.rollout_steps": 32}  # one minibatch: the least there is
    one = recipe(settings, run_lanes=8, run_precision=arguments.precision, run_collective_timeout=600.0)
    twice = recipe(
        settings | {"task.num_envs": 128, "algo.batch_size": 4096},
        run_lanes=8,
        run_precision=arguments.precision,
        run_collective_timeout=600.0,
    )
    with Runtime.start(one.run) as runtime:
        alone = IterationTimer(one, Runtime.single_process(one.run))
        strong, weak = IterationTimer(one, runtime), IterationTimer(twice, runtime)
        sums = in_cache(torch.rand(160, 160))
        contenders = {
            "sums one": sums if runtime.is_main else lambda: None,
            "sums both": sums,
            "one": alone.iterate if runtime.is_main else lambda: None,
            "both alone": alone.iterate,
            "strong": strong.iterate,
            "weak": weak.iterate,
            "bare one": bare_loop(alone) if runtime.is_main else lambda: None,
            "bare strong": ddp_loop(strong),
        }
        seconds = {name: [] for name in contenders}
        for step in contenders.values():
            timed(step)
        order, shuffling = list(contenders), random.Random(0)  # the same order in both processes
        for _ in range(arguments.rounds):
            shuffling.shuffle(order)
            for name in order:
                seconds[name].append(timed(contenders[name]))
        if runtime.is_main:
            report(seconds, arguments)


def report(seconds, arguments):
    def ratio(top, bottom, factor=1.0):
        low, middle, high = statistics.quantiles(
            [factor * a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)]
        )
        quiet = factor * statistics.quantiles(seconds[top])[0] / statistics.quantiles(seconds[bottom])[0]
        return f"{middle:.2f}x (half of them {low:.2f} to {high:.2f}), quiet {quiet:.2f}x"

    net = "MLP" if arguments.mlp else "CNN"
    print(f"{net}, {arguments.precision}, {arguments.rounds} rounds, two processes of one thread each")
    print(f"  two that need no memory    {ratio('sums one', 'sums both', 2)}")
    print(f"  two that share nothing     {ratio('one', 'both alone', 2)}: what this machine allows")
    print(f"  weak, batch doubled        {ratio('one', 'weak', 2)}")
    print(f"  strong, same global batch  {ratio('one', 'strong')}")
    print(f"  a bare DDP loop, strong    {ratio('bare one', 'bare strong')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--mlp", action="store_true")
    arguments = parser.parse_args()
    if started():
        work(arguments)
    else:
        start_again(2)


if __name__ == "__main__":
    main()
