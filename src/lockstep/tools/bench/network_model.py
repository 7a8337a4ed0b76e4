"""Cost of an all-reduce: a latency-bandwidth model of ring, tree and hierarchical reduction.

A link has a latency per message and a bandwidth per process. The model takes the fastest algorithm, as NCCL's tuner
does. The figures are typical values from data sheets and from NCCL's own model. Measure your machines if accuracy
matters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config import ConfigError


@dataclass(frozen=True)
class Link:
    """Connection from one process to the next."""

    latency: float
    """Seconds until a message arrives."""
    bandwidth: float
    """Bytes per second in each direction."""

    def __str__(self) -> str:
        return f"{self.latency * 1e6:.3g} us, {self.bandwidth / 1e9:.3g} GB/s per process"


@dataclass(frozen=True)
class NetworkModel:
    """Machines with `per_machine` processes each, fast links inside a machine and slower links between machines."""

    name: str
    per_machine: int
    inside: Link
    across: Link
    launch: float
    """Seconds to start any collective."""
    contention: float = 1.0
    """Slowdown factor of a process when all cores of its machine are busy, because they share memory and caches."""
    jitter: tuple[float, ...] = ()
    """Times of repeated equal work while all processes are busy, divided by their mean. Empty if not measured."""

    def describe(self) -> str:
        """Describe every assumption of the model."""
        if self.inside == self.across:
            return f"{self.name}: every link {self.inside}, as measured"
        links = f"{self.per_machine} processes per machine; inside {self.inside}; across {self.across}"
        return f"{self.name}: {links}; {self.launch * 1e6:.3g} us to start a collective"


def _gigabits(rate: float, shared_by: int) -> float:
    return rate * 1e9 / 8 / shared_by


NETWORKS = {
    network.name: network
    for network in (
        # NVLink 4 with a switch: about 370 GB/s of all-reduce traffic per GPU; one 400 Gb/s port per GPU.
        NetworkModel("nvlink+ib", 8, Link(1e-6, 370e9), Link(5e-6, _gigabits(400, 1)), 10e-6),
        NetworkModel("nvlink+ethernet-100g", 8, Link(1e-6, 370e9), Link(20e-6, _gigabits(100, 8)), 10e-6),
        NetworkModel("pcie+ethernet-100g", 8, Link(3e-6, 20e9), Link(20e-6, _gigabits(100, 8)), 10e-6),
        NetworkModel("pcie+ethernet-25g", 8, Link(3e-6, 20e9), Link(30e-6, _gigabits(25, 8)), 10e-6),
        NetworkModel("ethernet-25g", 1, Link(3e-6, 20e9), Link(30e-6, _gigabits(25, 1)), 10e-6),
        NetworkModel("ethernet-10g", 1, Link(3e-6, 20e9), Link(50e-6, _gigabits(10, 1)), 10e-6),
    )
}


def find_network(name: str) -> NetworkModel:
    if name not in NETWORKS:
        raise ConfigError(f"there is no network '{name}'.", f"Choose one of: here, {', '.join(NETWORKS)}.")
    return NETWORKS[name]


def ring(size: float, processes: int, link: Link) -> float:
    """Seconds of a ring all-reduce. It uses the full bandwidth and has latencies in proportion to the processes."""
    return 2 * (processes - 1) * link.latency + 2 * (processes - 1) / processes * size / link.bandwidth


def tree(size: float, processes: int, link: Link) -> float:
    """Seconds of a pipelined tree all-reduce. It has few latencies and sends every byte twice."""
    if processes == 1:
        return 0.0
    return 2 * math.ceil(math.log2(processes)) * link.latency + 2 * size / link.bandwidth


def hierarchical(size: float, machines: int, per_machine: int, inside: Link, across: Link) -> float:
    """Seconds of reduce-scatter inside each machine, all-reduce across machines, and all-gather inside."""
    scatter = (per_machine - 1) * inside.latency + (per_machine - 1) / per_machine * size / inside.bandwidth
    part = size / per_machine
    return 2 * scatter + min(ring(part, machines, across), tree(part, machines, across))


def all_reduce(size: float, processes: int, network: NetworkModel) -> tuple[float, str]:
    """Return the seconds of one all-reduce of `size` bytes, and the fastest algorithm."""
    if processes == 1:
        return 0.0, "nothing"
    machines = math.ceil(processes / network.per_machine)
    link = network.inside if machines == 1 else network.across
    seconds = {"ring": ring(size, processes, link), "tree": tree(size, processes, link)}
    if machines > 1:
        seconds["hierarchical"] = hierarchical(size, machines, network.per_machine, network.inside, network.across)
    fastest = min(seconds, key=lambda name: seconds[name])
    return network.launch + seconds[fastest], fastest


def fit_link(sizes: Sequence[int], seconds: Sequence[float], processes: int) -> Link:
    """Fit latency and bandwidth of a link to measured ring all-reduces, with least relative error."""
    hops, share = 2 * (processes - 1), 2 * (processes - 1) / processes
    # Least squares for seconds = hops x latency + share x size x (1 / bandwidth), each row divided by its seconds.
    rows = [(hops / t, share * n / t) for n, t in zip(sizes, seconds, strict=True)]
    (latency, inverse), _, rank, _ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    if rank < 2:
        raise ValueError("latency and bandwidth need at least 2 processes and 2 sizes")
    return Link(max(float(latency), 1e-9), 1.0 / max(float(inverse), 1e-15))
