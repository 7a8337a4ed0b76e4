"""Rendezvous of the processes of a run: over loopback on one host, over a network interface on several hosts."""

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from lockstep.config import ConfigError
from lockstep.launch.hang_report import CollectiveTimeoutError
from lockstep.launch.private_store import join_private_store
from lockstep.launch.process_lifetime import launch_directory
from lockstep.launch.world import WorldInfo


@dataclass(frozen=True)
class LaunchConfig:
    """Number of processes, hosts and restarts of a launch."""

    processes: int = 1
    """Processes on this host."""
    max_restarts: int = 0
    nodes: tuple[int, int] = (1, 1)
    """Minimum and maximum number of hosts."""
    endpoint: str | None = None
    """HOST:PORT of the rendezvous of several hosts; None for one host."""
    job: str | None = None
    """Job id shared by all hosts. A restarted host with the same job id continues the run directory of the job."""


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse a number of hosts: `2`, or `1:4` for any number from one to four."""
    minimum, _, maximum = text.partition(":")
    try:
        nodes = int(minimum), int(maximum or minimum)
    except ValueError:
        nodes = 0, 0
    if not 1 <= nodes[0] <= nodes[1]:
        raise ConfigError(f"--nnodes is {text!r}.", "Use a number of hosts, such as 2, or a range, such as 1:4.")
    return nodes


@dataclass(frozen=True)
class HostConfig:
    """Addresses and settings with which this host joins the rendezvous."""

    address: str
    environment: dict[str, str]
    rendezvous: dict[str, Any] = field(default_factory=dict)
    """Settings of torch's rendezvous of several hosts."""
    warnings: list[str] = field(default_factory=list)


def single_host() -> HostConfig:
    """Configure a run on one host. It cannot be reached from other hosts."""
    return HostConfig("127.0.0.1", loopback())


def loopback() -> dict[str, str]:
    """Return variables that bind gloo and NCCL's bootstrap to loopback, unless the user has chosen an interface.

    "=lo" is NCCL's syntax for an exact name. NCCL moves data between GPUs of one host over NVLink, PCIe or shared
    memory.
    """
    if not Path("/sys/class/net/lo").exists():
        return {}
    chosen = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    return {name: os.environ.get(name, interface) for name, interface in chosen.items()}


def multi_host(endpoint: str) -> HostConfig:
    """Configure one host of several: find the local address and interface that reach the endpoint."""
    name, _, port = endpoint.rpartition(":")
    if not name or not port.isdigit():
        raise ConfigError(f"--rdzv-endpoint is {endpoint!r}.", "Use the first host and a free port: 10.0.0.1:29500")
    try:
        target = socket.gethostbyname(name)
    except OSError:
        raise ConfigError(
            f"the host {name!r} of --rdzv-endpoint cannot be resolved on this machine.",
            "Use its IP address, or fix the name resolution (DNS, /etc/hosts).",
        ) from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, int(port)))  # sends nothing; the kernel looks up the route
        except OSError as error:
            raise ConfigError(f"there is no route to {endpoint}: {error}.", "Check `ip route`.") from None
        address = str(probe.getsockname()[0])
    addresses = interfaces()
    interface = next((name for name, own_address in addresses.items() if own_address == address), None)
    environment = {}
    if interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        environment = {name: os.environ.get(name, interface) for name in names}
    warnings = []
    if not address.startswith("127."):
        warnings.append(
            f"the processes of this run can be reached at {address} (torch's store and gloo have no authentication): "
            "use a private network, and a firewall that blocks all other hosts."
        )
    # A host without keep-alive for ten seconds counts as lost. One second was too short: it broke a healthy job.
    settings = {
        "is_host": target in addresses.values(),
        "keep_alive_interval": 2,
        "keep_alive_max_attempt": 5,
        "last_call_timeout": 5,
        "join_timeout": 600,
    }
    return HostConfig(address, environment, settings, warnings)


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of every network interface of this machine that has one."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [address.address for address in addresses if address.family == socket.AF_INET]
        if ipv4:
            found[name] = ipv4[0]
    return found


def join_store(world: WorldInfo, timeout: float) -> dist.Store:
    """Join the store of a run within the timeout."""
    try:
        return _open_store(world, timedelta(seconds=timeout))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "EADDRINUSE" in str(error):
            raise
        process = f"process {world.rank} of {world.size}"
        raise CollectiveTimeoutError(
            f"{process} waited {timeout:.0f} s (run.collective_timeout) for the others to start: {error}"
        ) from None


def _open_store(world: WorldInfo, timeout: timedelta) -> dist.Store:
    """Open the store of a run. On one host only that host can reach it, unless torchrun hosts the store."""
    directory = launch_directory()
    if directory is not None and world.local_size == world.size:
        return join_private_store(directory, world.restarts, world.size, timeout)
    uses_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("MASTER_ADDR") == "127.0.0.1" and world.local_size == world.size and not uses_agent_store:
        port = int(os.environ["MASTER_PORT"])
        # A socket of its own, because torch's store would listen on every interface.
        listener = socket.create_server(("127.0.0.1", port), backlog=1024).detach() if world.rank == 0 else None
        return dist.TCPStore("127.0.0.1", port, world.size, world.rank == 0, timeout=timeout, master_listen_fd=listener)
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    # torchrun's store survives a restart, so keys need the attempt number to hide stale addresses. A store created for
    # each attempt needs none, and hosts would disagree on it: a host that joins later counts its restarts from 0.
    return dist.PrefixStore(f"attempt/{world.restarts}", store) if uses_agent_store else store
