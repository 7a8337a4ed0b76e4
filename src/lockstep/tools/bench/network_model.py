"""What an all-reduce costs: a latency-bandwidth model of ring, tree and hierarchical reduction.

Shapes of time: n bytes, p processes, m machines with g processes each. A link has a latency for each message and a
bandwidth for each process. The cheapest way is taken, as NCCL's tuner does. Figures are typical of their kind, taken
from data sheets and from NCCL's own model; measure your machines where it matters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.config import ConfigError


@dataclass(frozen=True)
class Link:
    """One process's way to the next."""

    latency: float
    """Seconds until a message arrives."""
    bandwidth: float
    """Bytes a second, each way."""


@dataclass(frozen=True)
class NetworkModel:
    """Machines of `per_machine` processes, fast links within and slower ones between."""

    name: str
    per_machine: int
    inside: Link
    across: Link
    launch: float
    """Seconds to start any collective."""
    contention: float = 1.0
    """How many times slower a process is when all cores of its machine are busy: they share memory and caches."""
    jitter: tuple[float, ...] = ()
    """Times of the same work over and over while all are busy, as parts of their mean; none where nobody looked."""

    def describe(self) -> str:
        """Every assumption, in words."""

        def words(link: Link) -> str:
            return f"{link.latency * 1e6:.3g} us, {link.bandwidth / 1e9:.3g} GB/s a process"

        ways = f"inside {words(self.inside)}; across {words(self.across)}"
        if self.inside == self.across:
            return f"{self.name}: every link {words(self.inside)}, as measured"
        return (
            f"{self.name}: {self.per_machine} processes a machine; {ways}; "
            f"{self.launch * 1e6:.3g} us to start a collective"
        )


def _gigabits(rate: float, shared_by: int) -> float:
    return rate * 1e9 / 8 / shared_by


NETWORKS = {
    network.name: network
    for network in (
        # NVLink 4 behind a switch moves about 370 GB/s of all-reduce traffic a GPU; a 400 Gb/s port for each GPU.
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
        raise ConfigError(f"there is no network '{name}'.", f"There are: here, {', '.join(NETWORKS)}.")
    return NETWORKS[name]


def ring(size: float, processes: int, link: Link) -> float:
    """Every process sends to its neighbour: all the bandwidth, and a latency for each process."""
    if processes == 1:
        return 0.0
    return 2 * (processes - 1) * link.latency + 2 * (processes - 1) / processes * size / link.bandwidth


def tree(size: float, processes: int, link: Link) -> float:
    """Up a tree and down again, pipelined: few latencies, and every byte twice."""
    if processes == 1:
        return 0.0
    return 2 * math.ceil(math.log2(processes)) * link.latency + 2 * size / link.bandwidth


def hierarchical(size: float, machines: int, per_machine: int, inside: Link, across: Link) -> float:
    """Each machine sums a part on each of its processes, these meet across machines, and the result is shared."""
    scatter = (per_machine - 1) * inside.latency + (per_machine - 1) / per_machine * size / inside.bandwidth
    part = size / per_machine
    return 2 * scatter + min(ring(part, machines, across), tree(part, machines, across))


def all_reduce(size: float, processes: int, network: NetworkModel) -> tuple[float, str]:
    """Seconds for one all-reduce of so many bytes, and the way that is cheapest."""
    if processes == 1:
        return 0.0, "nothing"
    if processes <= network.per_machine:
        ways = {"ring": ring(size, processes, network.inside), "tree": tree(size, processes, network.inside)}
    else:
        machines = math.ceil(processes / network.per_machine)
        ways = {
            "ring": ring(size, processes, network.across),
            "tree": tree(size, processes, network.across),
            "hierarchical": hierarchical(size, machines, network.per_machine, network.inside, network.across),
        }
    way = min(ways, key=lambda name: ways[name])
    return network.launch + ways[way], way


def fit_link(sizes: Sequence[int], seconds: Sequence[float], processes: int) -> Link:
    """The link that explains measured all-reduces best, as rings, in relative error."""
    hops, share = 2 * (processes - 1), 2 * (processes - 1) / processes
    # Least squares for seconds = hops x latency + share x size x (1 / bandwidth), each row over its own seconds.
    rows = [(hops / t, share * n / t) for n, t in zip(sizes, seconds, strict=True)]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, inverse = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    return Link(max(latency, 1e-9), 1.0 / max(inverse, 1e-15))
