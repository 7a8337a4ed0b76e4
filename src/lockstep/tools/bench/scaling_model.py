"""What more processes would bring: one process's measured shares of a run, and a model of what they say to each other.

The work of W processes is measured on one: it takes the share of the run that one of W would host, and nobody else is
there. What lies beyond the smallest share is drawn on along a straight line: a fixed time, and a time for each sample.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config import Recipe
from lockstep.lanes import partition_lanes
from lockstep.pytree import leaves
from lockstep.tools.bench.measure import IterationTimer, alone, parts_of_mean, saved_bytes
from lockstep.tools.bench.network_model import NetworkModel, all_reduce

OVERLAP = 0.5
"""Part of an update's work (backward, but for its beginning) during which buckets travel."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds as a fixed time and a time for each sample."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class CostProfile:
    """What one process of a run was measured to take, by the size of its share, and what it would send."""

    rollout_step: LinearCost
    """A step of the local environments, by their number."""
    update: LinearCost
    """An update, by the local samples of its batch."""
    rest: LinearCost
    """Everything else of an iteration, by its local samples."""
    num_envs: int
    batch_size: int
    horizon: int
    updates: int
    samples: int
    """Global, of one iteration."""
    sent: list[tuple[str, int, float]]
    """Reductions of an iteration: name, bytes, how often. They depend neither on lanes nor on processes."""
    state_bytes: int
    """Memory of parameters, optimizer and gradient, on every process."""
    rollout_bytes: float
    """Memory of the rollout, for each environment."""
    activation_bytes: float
    """Memory that backward needs, for each sample of a batch."""
    jitter: list[float] = field(default_factory=list)
    """Times of the same work over and over, as parts of their mean: the slowest of many processes is waited for."""


def shares_from(values: Any) -> CostProfile:
    """A measurement as `asdict` wrote it, from whoever's hands it comes; ValueError where it cannot be."""
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
            raise ValueError(f"{str(number)[:50]!r} stands where a number should")
    if min(counts) < 1 or not all(isinstance(count, int) for count in counts):
        raise ValueError("it counts environments, samples and updates from 1, in whole numbers")
    return shares


@dataclass(frozen=True)
class Prediction:
    """One row of a plan."""

    processes: int
    batch: int
    """Global samples of an update."""
    steps_per_second: float = 0.0
    efficiency: float = 0.0
    """Against as many single processes."""
    hours: float = 0.0
    """To the recipe's budget."""
    compute: float = 0.0
    """Seconds of an iteration in which a process works."""
    waiting: float = 0.0
    """Seconds of an iteration in which it waits for the network."""
    memory: float = 0.0
    """Bytes on each device."""
    way: str = ""
    """How the gradient is reduced."""
    impossible: str = ""
    """Why so many processes cannot host the run."""


def measure_shares(
    recipe: Recipe,
    rounds: int = 3,
    say: Callable[[str], None] = lambda _: None,
    between: Callable[[], None] = lambda: None,
) -> CostProfile:
    """Time one process's share of the run as if it were one of 1, 2, 4, ... processes, up to one lane.

    `between` is called after each round, by whoever has something else to time in turns with it.
    """
    lanes = recipe.run.lanes or 8
    counts = [2**power for power in range(int(math.log2(lanes)) + 1)]
    meters = {}
    for count in counts:
        say(f"preparing the share of one of {count} processes")
        meters[count] = IterationTimer(recipe, alone(recipe.run, partition_lanes(lanes, count)[0]))
        meters[count].runtime.bytes_reduced.clear()
    times: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for number in range(rounds):
        # In turns, so that a machine that slows down slows all of them.
        say(f"measuring shares, round {number + 1} of {rounds}")
        for count, meter in meters.items():
            meter.runtime.timer.take()
            total = meter.seconds(meter.iterate)[1]
            phases = meter.runtime.timer.take()
            collect, learn = phases["env"] + phases["act"], phases["learn"]
            times[count].append({"collect": collect, "learn": learn, "rest": total - collect - learn})
        between()
    points = [
        (count, {name: statistics.median(row[name] for row in rows) for name in rows[0]})
        for count, rows in times.items()
    ]
    facts = _facts(meters[1], rounds)

    def fit(whole: int, name: str, times: int) -> LinearCost:
        return _fit([whole / count for count, _ in points], [seconds[name] / times for _, seconds in points])

    return CostProfile(
        rollout_step=fit(facts["num_envs"], "collect", facts["horizon"]),
        update=fit(facts["batch_size"], "learn", facts["updates"]),
        rest=fit(facts["samples"], "rest", 1),
        **facts,
    )


def _fit(sizes: list[float], seconds: list[float]) -> LinearCost:
    """The line through measured points that is closest in relative error, with no negative part."""
    weights = [1.0 / t**2 for t in seconds]
    mean_x = sum(w * x for w, x in zip(weights, sizes, strict=True)) / sum(weights)
    mean_y = sum(w * y for w, y in zip(weights, seconds, strict=True)) / sum(weights)
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes, strict=True))
    if not spread:
        return LinearCost(0.0, mean_y / mean_x)
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, sizes, seconds, strict=True)) / spread
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return LinearCost(mean_y - slope * mean_x, slope)


def _facts(meter: IterationTimer, rounds: int) -> dict[str, Any]:
    """What the model needs to know of a run, asked of a process that hosts all of it."""
    algorithm, envs = meter.algorithm, meter.task.num_envs
    works = {work.kind: work for work in algorithm.benchmark_ops()}
    learning = works["learning"]
    shared = sum(tensor.nbytes for tensor in algorithm.shared_state().values())
    return {
        "num_envs": envs,
        "batch_size": learning.samples,
        "horizon": works["env"].calls_per_iteration,
        "updates": learning.calls_per_iteration,
        "samples": algorithm.samples,
        "sent": [(name, size, times / rounds) for (name, size), times in sorted(meter.runtime.bytes_reduced.items())],
        "state_bytes": shared + 4 * meter.parameters,
        "rollout_bytes": sum(tensor.nbytes for tensor in leaves(algorithm.sample_buffers())) / envs,
        "activation_bytes": saved_bytes(learning.run) / learning.samples,
        "jitter": parts_of_mean([meter.seconds(learning.run)[1] for _ in range(40)]),
    }


def imbalance(shares: CostProfile, network: NetworkModel) -> Sequence[float]:
    """The jitter to reckon with: that of a machine where all are busy, if somebody looked, or else of one alone."""
    return network.jitter or shares.jitter


def slowest_of(processes: int, jitter: Sequence[float]) -> float:
    """The time of the slowest of so many that each draw one of these times, on average."""
    if not jitter:
        return 1.0
    below = [(place / len(jitter)) ** processes for place in range(len(jitter) + 1)]  # all of them are no slower
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
    """What so many processes would do: at the same global batch, or with one that grows along with them.

    `cores` is how many of this machine's cores there are to share, one for each process; None gives each its own.
    """
    times = processes if grow else 1
    batch, envs = shares.batch_size * times, shares.num_envs * times
    if processes > min(envs, batch):
        what = f"{envs:,} environments" if envs < batch else f"batches of {batch:,} samples"
        return Prediction(processes, batch, impossible=f"{what} cannot be shared by {processes:,}")
    samples = shares.samples * times
    share = 1 / processes
    update, steps = shares.update.at(batch * share), shares.horizon * shares.rollout_step.at(envs * share)
    crowded = max(1.0, processes / cores) if cores is not None else 1.0
    if cores is not None and cores > 1:  # of so many, each further one that is busy slows the others by as much
        crowded *= 1.0 + (network.contention - 1.0) * (min(processes, cores) - 1) / (cores - 1)
    compute = crowded * (steps + shares.updates * update + shares.rest.at(samples * share))
    travelling = {name: 0.0 for name, _, _ in shares.sent}
    way, last = "", 0.0
    for name, size, often in shares.sent:
        seconds, chosen = all_reduce(size, processes, network)
        travelling[name] += often * seconds
        if name == "gradient":
            way, last = chosen, seconds
    gradient = travelling.pop("gradient", 0.0)
    # Buckets travel while backward works; the last of them cannot, and what is too much for that time waits as well.
    hidden = OVERLAP * shares.updates * update * crowded
    waiting = sum(travelling.values()) + max(last * shares.updates, gradient - hidden)
    # They meet after all of it. Of more than there are cores, one works while another waits.
    at_once = processes if cores is None else min(processes, cores)
    waiting += compute * (slowest_of(at_once, imbalance(shares, network)) - 1.0)
    speed = samples / (compute + waiting)
    alone = shares.samples / (
        shares.horizon * shares.rollout_step.at(shares.num_envs)
        + shares.updates * shares.update.at(shares.batch_size)
        + shares.rest.at(shares.samples)
    )
    memory = shares.state_bytes + shares.rollout_bytes * envs * share + shares.activation_bytes * batch * share
    return Prediction(
        processes=processes,
        batch=batch,
        steps_per_second=speed,
        efficiency=speed / alone / processes,
        hours=budget / speed / 3600,
        compute=compute,
        waiting=waiting if processes > 1 else 0.0,
        memory=memory,
        way=way,
    )


def scaling_limit(shares: CostProfile, rows: list[Prediction], cores: int | None = None) -> str:
    """Where more processes at the same global batch stop paying, and why, in words."""
    possible = [row for row in rows if not row.impossible]
    for before, row in itertools.pairwise(possible):
        if row.steps_per_second < before.steps_per_second * (row.processes / before.processes) ** 0.5:
            where = f"It stops paying between {before.processes:,} and {row.processes:,} processes at this batch"
            if cores is not None and row.processes > cores:
                return f"{where}: {row.processes:,} processes share {cores} cores."
            fixed = (
                shares.updates * shares.update.fixed + shares.horizon * shares.rollout_step.fixed + shares.rest.fixed
            )
            if fixed > row.waiting:
                why = (
                    f"the fixed time of updates and steps ({fixed * 1e3:.3g} ms an iteration), which no share shortens"
                )
            else:
                why = f"waiting for the network ({row.waiting * 1e3:.3g} ms an iteration)"
            return f"{where}: what is left is {why}. A larger batch moves that point."
    last = rows[-1]
    if not possible:
        return f"It cannot be shared at all: {last.impossible}."
    if last.impossible:
        most = possible[-1].processes
        return f"It pays up to {most:,} processes, and then there is nothing left to share: {last.impossible}."
    return f"It pays up to {last.processes:,} processes at least."


def as_json(
    shares: CostProfile, network: NetworkModel, fixed: list[Prediction], growing: list[Prediction]
) -> dict[str, Any]:
    return {
        "shares": asdict(shares),
        "network": asdict(network),
        "fixed_batch": [asdict(row) for row in fixed],
        "growing_batch": [asdict(row) for row in growing],
    }
