"""Our optimizer against torch's DDP: the same loss, network, batch and clipping, two processes of one thread each.

python benchmarks/ddp.py                    0.3M, 5M and 48M parameters
python benchmarks/ddp.py --buckets          and our speed by size of bucket

Both are taken in turns in the same processes, so that a machine that slows down slows both; the median of the ratios of
neighbours is reported, with the quarter below and above it.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import start_again, started

from lockstep.config import RunConfig
from lockstep.distributed import DistributedOptimizer, Runtime
from lockstep.nn.encoders import CNN, EncoderConfig
from lockstep.protocols import Loss

CLIP = 0.5


def cnn():
    from gymnasium.spaces import Box

    return nn.Sequential(
        CNN(Box(0, 1, (3, 8, 8), "uint8"), EncoderConfig(hidden_sizes=(32, 64), num_layers=3)), nn.Linear(256, 5)
    )


def mlp(width, depth):
    layers = [nn.Linear(64, width), nn.Tanh()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 5))


PROBLEMS = {  # network, input of one process, steps a turn
    "0.3M (Snake's CNN)": (cnn, lambda: torch.randint(2, (1024, 3, 8, 8), dtype=torch.uint8), 2),
    "5M (MLP)": (lambda: mlp(1100, 4), lambda: torch.randn(256, 64), 6),
    "48M (MLP)": (lambda: mlp(3460, 4), lambda: torch.randn(128, 64), 2),
}


def build(make, seed=0):
    torch.manual_seed(seed)
    return make()


def ours(make, x, y, runtime):
    net = build(make)
    optimizer = DistributedOptimizer(runtime, torch.optim.Adam(net.named_parameters(), fused=True), max_grad_norm=CLIP)

    def loss(batch):
        error = (net(batch["x"]) - batch["y"]).square().sum()
        return Loss(error, len(batch["x"]), {"error": error.detach()})

    return lambda: optimizer.step(loss, {"x": x, "y": y})


def ddp(make, x, y):
    net = DistributedDataParallel(build(make), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def step():
        optimizer.zero_grad()
        (net(x) - y).square().sum(-1).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()

    return step


def timed(step, times):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / times


def compare(contenders, times, rounds):
    """Seconds of a step by contender, round by round; each goes first as often as any other."""
    seconds = {name: [] for name in contenders}
    for step in contenders.values():
        timed(step, 1)
    for number in range(rounds):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(timed(contenders[name], times))
    return seconds


def work(arguments):
    from lockstep.launch.device import disable_malloc_trim

    disable_malloc_trim()
    torch.set_num_threads(1)
    with Runtime.start(RunConfig(lanes=8, device="cpu", collective_timeout=300)) as runtime:
        for name, (make, inputs, times) in PROBLEMS.items():
            torch.manual_seed(runtime.rank)
            x = inputs()
            y = torch.randn(len(x), 5)
            contenders = {"ours": ours(make, x, y, runtime), "ddp": ddp(make, x, y)}
            seconds = compare(contenders, times, arguments.rounds)
            ratios = sorted(b / a for a, b in zip(seconds["ours"], seconds["ddp"], strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4)
            if runtime.is_main:
                count = sum(p.numel() for p in build(make).parameters())
                step = statistics.median(seconds["ours"]) * 1e3
                print(f"{name:20} {count:>12,}  ours {step:8.1f} ms  {middle:.3f}x of DDP ({low:.3f} to {high:.3f})")
            if arguments.buckets:
                sizes = (0.5, 1, 2, 4, 8, 16, 32, 1024)
                contenders = {}
                for size in sizes:
                    runtime.bucket_bytes = int(size * 2**20)
                    contenders[size] = ours(make, x, y, runtime)
                runtime.bucket_bytes = int(RunConfig().grad_bucket_mb * 2**20)
                seconds = compare(contenders, times, arguments.rounds)
                if runtime.is_main:
                    found = "  ".join(f"{s:g} MB {statistics.median(seconds[s]) * 1e3:.1f}" for s in sizes)
                    print(f"{'':20} ms a step by bucket: {found}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--buckets", action="store_true")
    arguments = parser.parse_args()
    if started():
        work(arguments)
    else:
        start_again(2)


if __name__ == "__main__":
    main()
