"""Measure a recipe's iterations and their bare work: environments and networks without the training loop.

The two measurements alternate, so that a machine that slows down affects both. On a CPU with one thread, seconds are
CPU seconds, because other programs on the machine add wall time that is not overhead of Lockstep.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep import __version__
from lockstep.base import Algorithm, VecEnv
from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe, RunConfig, as_dict
from lockstep.distributed import Runtime
from lockstep.launch.device import choose_device
from lockstep.launch.world import WorldInfo
from lockstep.protocols import Benchmarkable, BenchmarkOp
from lockstep.training_loop import iterate

PARTS = {"env": "env", "act": "inference", "learn": "learning", "reduce": "reduction"}
"""Phases of the loop and their names in the split. The remaining time is `rest`."""
DATA_PARTS = {"load": "loading", "learn": "learning", "reduce": "reduction"}
"""Phases of a supervised run, which loads batches instead of acting and stepping environments."""
BATCH_DIVISOR = 4
"""Updates are also timed on a batch smaller by this factor, to separate fixed time from time per sample."""

WARM_UP_SECONDS = 60.0
"""Limit of the warm-up, for an algorithm that does not count its updates."""


def single_process_runtime(run: RunConfig, hosting: range | None = None) -> Runtime:
    """Return the runtime of a single process on the device that a run would use on this machine."""
    return Runtime.single_process(run, str(choose_device(run.device, WorldInfo())), hosting)


class IterationTimer:
    """Task and algorithm of one process's share of a run, for timing."""

    def __init__(self, recipe: Recipe, runtime: Runtime) -> None:
        self.runtime = runtime
        self.task: VecEnv = recipe.task.build(runtime.lanes, runtime.device)
        self.algorithm: Algorithm = recipe.algo.build(self.task, runtime)
        self.clock = TrainState(total_samples=2**62)
        self.check_every = recipe.run.replica_check_every
        self._warm_up()

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.algorithm.model_state_dict().values() if tensor.requires_grad)

    def iterate(self) -> None:
        """Run one iteration of the training loop without logging, evaluations and checkpoints."""
        iterate(self.task, self.algorithm, self.clock, self.runtime, self.check_every)
        self.clock.flush_metrics()
        self.runtime.all_reduce_any(stop=False, save=False)

    def _warm_up(self) -> None:
        """Iterate until the networks learn: compiles kernels, makes buffers, collects the first samples of a replay.

        Before `learning_starts` an iteration has no update, and would be compared with the bare work of one.
        """
        self.iterate()
        start = time.perf_counter()  # after the first iteration, which may compile for a minute
        waiting = self.algorithm.updates == 0
        while self.runtime.all_reduce_any(waiting=waiting)["waiting"]:
            self.iterate()
            waiting = self.algorithm.updates == 0 and time.perf_counter() - start < WARM_UP_SECONDS

    def seconds(self, work: Callable[[], object], times: int = 1) -> tuple[float, float]:
        """Return the seconds of `times` calls: CPU seconds where they apply (see the module), and wall seconds."""
        self._finish()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(times):
            work()
        self._finish()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        use_cpu_time = self.runtime.size == 1 and torch.get_num_threads() == 1 and self.runtime.device.type == "cpu"
        return (cpu if use_cpu_time else wall), wall

    def ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """Return the bare operations of the algorithm."""
        if not isinstance(self.algorithm, Benchmarkable):
            raise ConfigError(
                f"{type(self.algorithm).__name__} has no benchmark_ops() to compare its speed with.",
                "Implement benchmark_ops(fewer): see lockstep.protocols.Benchmarkable.",
            )
        return self.algorithm.benchmark_ops(fewer)

    def seconds_in_half(self, work: Callable[[], object]) -> float:
        """Return the seconds of one call of `seconds` under bf16 autocast."""
        before, self.runtime.autocast_dtype = self.runtime.autocast_dtype, torch.bfloat16
        try:
            return self.seconds(work)[0]
        finally:
            self.runtime.autocast_dtype = before

    def _finish(self) -> None:
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()


def measure(recipe: Recipe, runtime: Runtime, seconds: float = 10.0, rounds: int = 5) -> dict[str, Any]:
    """Time iterations and their bare work alternately, for at least `rounds` rounds and about `seconds` seconds."""
    meter = IterationTimer(recipe, runtime)
    ops = [*meter.ops(), *meter.ops(BATCH_DIVISOR)]
    (learning,) = (op for op in ops if op.kind == "learning" and op.batch_divisor == 1)
    for op in ops:
        op.run()
    meter.seconds_in_half(learning.run)
    bf16_seconds: list[float] = []
    iterations: list[tuple[float, float]] = []
    op_seconds: list[list[float]] = [[] for _ in ops]
    phases: dict[str, float] = {}
    start, more = time.perf_counter(), True
    while more:
        runtime.timer.take()
        iterations.append(meter.seconds(meter.iterate))
        for name, spent in runtime.timer.take().items():
            phases[name] = phases.get(name, 0.0) + spent
        for times, op in zip(op_seconds, ops, strict=True):
            times.append(meter.seconds(op.run, op.calls_per_iteration)[0])
        if runtime.autocast_dtype is None:
            bf16_seconds.append(meter.seconds_in_half(learning.run))
        unfinished = len(iterations) < rounds or time.perf_counter() - start < seconds
        more = runtime.all_reduce_any(more=unfinished)["more"]
    pairs = list(zip(ops, (statistics.median(times) for times in op_seconds), strict=True))
    report = _report(meter, recipe, iterations, phases, pairs)
    plain = next(seconds for op, seconds in pairs if op is learning) / learning.calls_per_iteration
    return report | {"bf16_gain": plain / statistics.median(bf16_seconds) if bf16_seconds else 1.0}


REDUCTIONS = (2**6, 2**16, 2**20, 2**22)
"""Bytes of the reductions that are timed."""


def time_reductions(runtime: Runtime, times: int = 20, sizes: Sequence[int] = REDUCTIONS) -> dict[str, float]:
    """Return the median seconds of an all-reduce, by its bytes."""
    seconds: dict[str, float] = {}
    for size in sizes:
        tensor = torch.zeros(size // 4, device=runtime.device)
        durations = []
        for _ in range(times):
            start = time.perf_counter()
            runtime.all_reduce_sum(tensor)
            if runtime.device.type == "cuda":
                torch.cuda.synchronize()
            durations.append(time.perf_counter() - start)
        seconds[str(tensor.nbytes)] = statistics.median(durations)
    return seconds


def time_contention(meter: IterationTimer, times: int = 8) -> list[tuple[float, float]]:
    """Time an update's bare work on the main process, alternately alone and with all processes computing."""
    (op,) = (op for op in meter.ops() if op.kind == "learning")
    op.run()  # warm up the caches
    durations: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * times):
        alone = number % 2 == 0
        meter.runtime.all_reduce_any(ready=True)  # barrier: all processes start together
        if meter.runtime.is_main or not alone:
            durations[alone].append(meter.seconds(op.run)[1])
    return list(zip(durations[True], durations[False], strict=False))


def contention_and_jitter(pairs: list[tuple[float, float]]) -> tuple[float, list[float]]:
    """Return the slowdown of work next to other processes, as a ratio of means, and its jitter."""
    alone, contended = zip(*pairs, strict=True)
    return max(1.0, statistics.fmean(contended) / statistics.fmean(alone)), relative_to_mean(contended)


def relative_to_mean(seconds: Sequence[float]) -> list[float]:
    """Return times of equal work divided by their mean, sorted."""
    mean = statistics.fmean(seconds)
    return sorted(time / mean for time in seconds)


def saved_bytes(work: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps between forward and backward."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            return tensor  # parameters are in memory anyway
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(kept.values())


def _report(
    meter: IterationTimer,
    recipe: Recipe,
    iterations: list[tuple[float, float]],
    phases: dict[str, float],
    ops: list[tuple[BenchmarkOp, float]],
) -> dict[str, Any]:
    runtime, samples = meter.runtime, meter.algorithm.samples
    iteration = statistics.median(seconds for seconds, _ in iterations)
    wall = statistics.median(wall for _, wall in iterations)
    total = sum(wall for _, wall in iterations)
    parts = DATA_PARTS if "load" in phases else PARTS
    split = {part: phases.get(name, 0.0) / total for name, part in parts.items()}
    split["rest"] = max(0.0, 1.0 - sum(split.values()))
    bare = {op.kind: seconds for op, seconds in ops if op.batch_divisor == 1}
    fixed, per_sample = _fixed_time(ops)
    return {
        "recipe": recipe.name,
        "lockstep": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if runtime.device.type == "cuda" else platform.machine(),
        "processes": runtime.size,
        "threads": torch.get_num_threads(),
        "precision": recipe.run.precision,
        "parameters": meter.parameters,
        "samples_per_iteration": samples,
        "rounds": len(iterations),
        "steps_per_second": samples / wall,
        "ratio_to_bare": sum(bare.values()) / iteration,
        "split": split,
        "seconds": {"iteration": iteration, "wall": wall} | bare,
        "learning": {"fixed_seconds": fixed, "seconds_per_sample": per_sample},
        "config": as_dict(recipe),
    }


def _fixed_time(ops: list[tuple[BenchmarkOp, float]]) -> tuple[float, float]:
    """Return the fixed time of a bare update and its time per local sample, from two batch sizes."""
    full, smaller = ((op, s / op.calls_per_iteration) for op, s in ops if op.kind == "learning")
    if full[0].samples == smaller[0].samples:  # the share is too small to be divided
        return full[1], 0.0
    per_sample = max(0.0, (full[1] - smaller[1]) / (full[0].samples - smaller[0].samples))
    return max(0.0, full[1] - per_sample * full[0].samples), per_sample


def verdict(report: dict[str, Any]) -> str:
    """Describe what limits the speed of a run, and what would help."""
    text, gain = _bound(report), report["bf16_gain"]
    if text.startswith("learning-bound") and gain > 1.25:
        text += f" In bf16 the bare work of an update is {gain:.1f} times as fast: try --run.precision bf16."
    return text


def _bound(report: dict[str, Any]) -> str:
    split = report["split"]
    largest = max((part for part in split if part != "rest"), key=lambda part: split[part])
    share = f"{split[largest]:.0%} of the time"
    if split["rest"] > split[largest]:
        return (
            f"overhead-bound: {split['rest']:.0%} of the time is neither environments nor networks; try larger batches."
        )
    if largest == "learning":
        fixed, per_sample = report["learning"]["fixed_seconds"], report["learning"]["seconds_per_sample"]
        local = report["config"]["algo"].get("batch_size", 0) / report["processes"]
        if fixed <= 0.01 * per_sample * local:
            return (
                f"learning-bound ({share}): more processes help, each with its share of the batch (now {local:,.0f})."
            )
        until = round(report["processes"] * per_sample * local / fixed)
        if until <= report["processes"]:
            return (
                f"learning-bound ({share}), and an update's fixed time ({fixed * 1e3:.2g} ms) is longer than its work"
                f" on {local:,.0f} samples: larger batches help more than more processes."
            )
        return (
            f"learning-bound ({share}): more processes help until about {until}, where an update's fixed time "
            f"({fixed * 1e3:.2g} ms) is as long as its work on {local * report['processes'] / until:,.0f} samples."
        )
    return {
        "env": f"env-bound ({share}): more processes help while each has its own core; a faster GPU does not.",
        "inference": f"inference-bound ({share}): more environments use every forward pass better.",
        "loading": f"loading-bound ({share}): --algo.num-workers N loads batches ahead in N workers per process.",
        "reduction": (
            f"reduction-bound ({share}): larger batches or --run.grad-comm-dtype bf16 send fewer bytes per sample."
        ),
    }[largest]
