"""Predict scaling from the measured shares of one process and a model of the communication between processes.

A single process measures the work of one of W processes: it hosts only the lanes of that process. Shares smaller than
the smallest measured one are extrapolated linearly: a fixed time and a time per sample.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lockstep.config import Recipe
from lockstep.lanes import partition_lanes
from lockstep.pytree import leaves
from lockstep.tools.bench.measure import IterationTimer, relative_to_mean, saved_bytes, single_process_runtime
from lockstep.tools.bench.network_model import NetworkModel, all_reduce

OVERLAP = 0.5
"""Fraction of an update (most of backward) during which gradient buckets are reduced concurrently."""


@dataclass(frozen=True)
class LinearCost:
    """Linear model of seconds: a fixed time and a time per sample."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class CostProfile:
    """Measured times and memory of one process by the size of its share, and the bytes it reduces."""

    rollout_step: LinearCost
    """Time of one step of the local environments, by their number."""
    update: LinearCost
    """Time of one update, by the local samples of its batch."""
    rest: LinearCost
    """Remaining time of an iteration, by its local samples."""
    num_envs: int
    batch_size: int
    horizon: int
    updates: int
    samples: int
    """Global samples of one iteration."""
    sent: list[tuple[str, int, float]]
    """Reductions of an iteration: name, bytes, count. They depend neither on lanes nor on processes."""
    state_bytes: int
    """Memory of parameters, optimizer and gradients on every process."""
    rollout_bytes: float
    """Memory of the rollout per environment."""
    activation_bytes: float
    """Memory that backward needs per sample of a batch."""
    jitter: list[float] = field(default_factory=list)
    """Times of repeated equal work, divided by their mean. Processes wait for the slowest of them."""

    def seconds(self, envs: float, batch: float, samples: float) -> float:
        """Return the time of an iteration of one process with these local sizes."""
        steps = self.horizon * self.rollout_step.at(envs)
        return steps + self.updates * self.update.at(batch) + self.rest.at(samples)


def shares_from(values: Any) -> CostProfile:
    """Restore a measurement that `asdict` wrote. The values are untrusted; invalid ones raise ValueError."""
    lines = {name: LinearCost(**values[name]) for name in ("rollout_step", "update", "rest")}
    shares = CostProfile(
        **values | lines | {"sent": [(str(name), size, times) for name, size, times in values["sent"]]}
    )
    counts = [shares.num_envs, shares.batch_size, shares.horizon, shares.updates, shares.samples]
    amounts = [shares.state_bytes, shares.rollout_bytes, shares.activation_bytes]
    amounts += [amount for line in lines.values() for amount in (line.fixed, line.per_sample)]
    amounts += [amount for _, *pair in shares.sent for amount in pair] + shares.jitter
    for number in (*counts, *amounts):
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) < 1e18:
            raise ValueError(f"{str(number)[:50]!r} is not a valid number")
    if min(counts) < 1 or not all(isinstance(count, int) for count in counts):
        raise ValueError("counts of environments, samples and updates must be integers of at least 1")
    return shares


@dataclass(frozen=True)
class Prediction:
    """One row of a plan."""

    processes: int
    batch: int
    """Global samples of an update."""
    steps_per_second: float = 0.0
    efficiency: float = 0.0
    """Speed relative to `processes` independent single processes."""
    hours: float = 0.0
    """Hours until run.total_samples."""
    compute: float = 0.0
    """Seconds per iteration in which a process computes."""
    waiting: float = 0.0
    """Seconds per iteration in which a process waits for the network and for slower processes."""
    memory: float = 0.0
    """Bytes on each device."""
    way: str = ""
    """All-reduce algorithm of the gradients: ring, tree or hierarchical."""
    impossible: str = ""
    """Why this number of processes cannot run the recipe. Empty if it can."""


def measure_shares(
    recipe: Recipe,
    rounds: int = 3,
    report: Callable[[str], None] = lambda _: None,
    after_round: Callable[[], None] = lambda: None,
) -> CostProfile:
    """Time the share of one process as if it were one of 1, 2, 4, ... processes, down to one lane.

    `after_round` is called after each round, so that the caller can alternate with another measurement.
    """
    lanes = recipe.run.lanes or 8
    counts = [2**power for power in range(int(math.log2(lanes)) + 1)]
    meters = {}
    for count in counts:
        report(f"preparing the share of one of {count} processes")
        meters[count] = IterationTimer(recipe, single_process_runtime(recipe.run, partition_lanes(lanes, count)[0]))
        meters[count].runtime.bytes_reduced.clear()
    measured: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for number in range(rounds):
        # Alternate between sizes, so that a machine that slows down affects all of them.
        report(f"measuring shares, round {number + 1} of {rounds}")
        for count, meter in meters.items():
            meter.runtime.timer.take()
            total = meter.seconds(meter.iterate)[1]
            phases = meter.runtime.timer.take()
            collect, learn = phases["env"] + phases["act"], phases["learn"]
            measured[count].append({"collect": collect, "learn": learn, "rest": total - collect - learn})
        after_round()
    sizes = _measure_sizes(meters[1], rounds)

    def fit(total: int, name: str, times: int) -> LinearCost:
        seconds = [statistics.median(row[name] for row in rows) / times for rows in measured.values()]
        return _fit([total / count for count in counts], seconds)

    return CostProfile(
        rollout_step=fit(sizes["num_envs"], "collect", sizes["horizon"]),
        update=fit(sizes["batch_size"], "learn", sizes["updates"]),
        rest=fit(sizes["samples"], "rest", 1),
        **sizes,
    )


def _fit(sizes: list[float], seconds: list[float]) -> LinearCost:
    """Fit a line with least relative error and without negative coefficients."""
    points, weights = np.array([sizes, seconds]), 1.0 / np.square(seconds)
    mean_x, mean_y = np.average(points, axis=1, weights=weights).tolist()
    (variance, covariance), _ = np.cov(points, aweights=weights, ddof=0).tolist()
    slope = min(max(covariance / variance, 0.0), mean_y / mean_x) if variance else mean_y / mean_x
    return LinearCost(mean_y - slope * mean_x, slope)


def _measure_sizes(meter: IterationTimer, rounds: int) -> dict[str, Any]:
    """Collect the sizes that the model needs from a process that hosts the whole run."""
    algorithm, envs = meter.algorithm, meter.task.num_envs
    ops = {op.kind: op for op in meter.ops()}
    learning = ops["learning"]
    shared = sum(tensor.nbytes for tensor in algorithm.shared_state().values())
    return {
        "num_envs": envs,
        "batch_size": learning.samples,
        "horizon": ops["env"].calls_per_iteration,
        "updates": learning.calls_per_iteration,
        "samples": algorithm.samples,
        "sent": [(name, size, times / rounds) for (name, size), times in sorted(meter.runtime.bytes_reduced.items())],
        "state_bytes": shared + 4 * meter.parameters,
        "rollout_bytes": sum(tensor.nbytes for tensor in leaves(algorithm.sample_buffers())) / envs,
        "activation_bytes": saved_bytes(learning.run) / learning.samples,
        "jitter": relative_to_mean([meter.seconds(learning.run)[1] for _ in range(40)]),
    }


def slowest_of(processes: int, jitter: Sequence[float]) -> float:
    """Return the expected maximum of `processes` times drawn independently from `jitter`."""
    if not jitter:
        return 1.0
    below = [(rank / len(jitter)) ** processes for rank in range(len(jitter) + 1)]  # P(maximum is among the lowest)
    return sum(
        time * (until - before) for time, (before, until) in zip(sorted(jitter), itertools.pairwise(below), strict=True)
    )


def predict(
    shares: CostProfile,
    processes: int,
    network: NetworkModel,
    budget: int,
    *,
    grow: bool = False,
    cores: int | None = None,
) -> Prediction:
    """Predict speed and memory on `processes` processes, at the same global batch or (`grow`) in proportion to them.

    `cores` is the number of cores that the processes share. None: each process has its own device.
    """
    times = processes if grow else 1
    batch, envs = shares.batch_size * times, shares.num_envs * times
    if processes > min(envs, batch):
        what = f"{envs:,} environments" if envs < batch else f"batches of {batch:,} samples"
        return Prediction(processes, batch, impossible=f"{what} cannot be split over {processes:,} processes")
    samples = shares.samples * times
    share = 1 / processes
    slowdown = max(1.0, processes / cores) if cores is not None else 1.0
    if cores is not None and cores > 1:  # contention grows linearly with the number of busy cores
        slowdown *= 1.0 + (network.contention - 1.0) * (min(processes, cores) - 1) / (cores - 1)
    compute = slowdown * shares.seconds(envs * share, batch * share, samples * share)
    # Time of all reductions of an iteration, by name
    reduce_seconds = {name: 0.0 for name, _, _ in shares.sent}
    algorithm, last_bucket = "", 0.0
    for name, size, count in shares.sent:
        seconds, fastest = all_reduce(size, processes, network)
        reduce_seconds[name] += count * seconds
        if name == "gradient":
            algorithm, last_bucket = fastest, seconds
    gradient = reduce_seconds.pop("gradient", 0.0)
    # Backward hides the reduction of gradient buckets, except the last bucket and time beyond the overlap.
    hidden = OVERLAP * shares.updates * shares.update.at(batch * share) * slowdown
    waiting = sum(reduce_seconds.values()) + max(last_bucket * shares.updates, gradient - hidden)
    # Wait for the slowest process. With fewer cores than processes, others compute during that wait.
    # The jitter is that of a fully busy machine if it was measured, otherwise that of a single process.
    concurrent = processes if cores is None else min(processes, cores)
    waiting += compute * (slowest_of(concurrent, network.jitter or shares.jitter) - 1.0)
    speed = samples / (compute + waiting)
    single_speed = shares.samples / shares.seconds(shares.num_envs, shares.batch_size, shares.samples)
    memory = shares.state_bytes + shares.rollout_bytes * envs * share + shares.activation_bytes * batch * share
    return Prediction(
        processes=processes,
        batch=batch,
        steps_per_second=speed,
        efficiency=speed / single_speed / processes,
        hours=budget / speed / 3600,
        compute=compute,
        waiting=waiting if processes > 1 else 0.0,
        memory=memory,
        way=algorithm,
    )


def scaling_limit(shares: CostProfile, rows: list[Prediction], cores: int | None = None) -> str:
    """Describe up to how many processes the same global batch gets faster, and what limits it."""
    possible = [row for row in rows if not row.impossible]
    for before, row in itertools.pairwise(possible):
        if row.steps_per_second < before.steps_per_second * (row.processes / before.processes) ** 0.5:
            text = f"Scaling at this batch size ends between {before.processes:,} and {row.processes:,} processes"
            if cores is not None and row.processes > cores:
                return f"{text}: {row.processes:,} processes share {cores} cores."
            fixed = shares.seconds(0, 0, 0)
            if fixed > row.waiting:
                limit = f"the fixed time of updates and steps ({fixed * 1e3:.3g} ms per iteration)"
            else:
                limit = f"waiting for the network ({row.waiting * 1e3:.3g} ms per iteration)"
            return f"{text}. The limit is {limit}. A larger batch moves it."
    last = rows[-1]
    if not possible:
        return f"The run cannot be split: {last.impossible}."
    if last.impossible:
        largest = possible[-1].processes
        return f"The run scales up to {largest:,} processes and cannot be split further: {last.impossible}."
    return f"The run scales up to {last.processes:,} processes or more."


def as_json(
    shares: CostProfile, network: NetworkModel, fixed: list[Prediction], growing: list[Prediction]
) -> dict[str, Any]:
    return {
        "shares": asdict(shares),
        "network": asdict(network),
        "fixed_batch": [asdict(row) for row in fixed],
        "growing_batch": [asdict(row) for row in growing],
    }
