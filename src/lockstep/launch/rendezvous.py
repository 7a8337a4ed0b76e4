"""How the processes of a run find each other: over loopback on one host, over an address and interface on several."""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.config import ConfigError
from lockstep.launch.hang_report import CollectiveTimeoutError
from lockstep.launch.private_store import join_private_store
from lockstep.launch.process_lifetime import launch_directory
from lockstep.launch.world import WorldInfo


@dataclass(frozen=True)
class LaunchConfig:
    """How many processes, on how many hosts, and how often they may be started again."""

    processes: int = 1
    """On this host."""
    max_restarts: int = 0
    nodes: tuple[int, int] = (1, 1)
    """The fewest and the most hosts."""
    endpoint: str | None = None
    """HOST:PORT where several hosts meet."""
    job: str | None = None
    """What several hosts call this job; a run directory begun by a job is gone on with by the same job."""


def parse_nodes(text: str) -> tuple[int, int]:
    """`2`, or `1:4` for any number from one to four."""
    few, _, many = text.partition(":")
    try:
        nodes = int(few), int(many or few)
    except ValueError:
        nodes = 0, 0
    if not 1 <= nodes[0] <= nodes[1]:
        raise ConfigError(f"--nnodes is {text!r}.", "Give a number of hosts, such as 2, or a range, such as 1:4.")
    return nodes


@dataclass(frozen=True)
class HostConfig:
    """This host, as the others reach it."""

    endpoint: str
    """Where launchers meet: a file on one host, HOST:PORT on several."""
    address: str
    rendezvous: dict[str, Any]
    """Settings of the meeting, in torch's words."""
    environment: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def single_host(shared: Path) -> HostConfig:
    """One host alone: nothing of the run can be reached from beyond it."""
    return HostConfig(str(shared / "rendezvous"), "127.0.0.1", {"store_type": "file"}, loopback())


def loopback() -> dict[str, str]:
    """Variables that keep gloo and NCCL's bootstrap on the loopback interface, where the user has not chosen another.

    "=lo" is NCCL's form of an exact name. NCCL moves data between GPUs of one host over NVLink, PCIe or shared memory.
    """
    if not Path("/sys/class/net/lo").exists():
        return {}
    chosen = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    return {name: os.environ.get(name, interface) for name, interface in chosen.items()}


def multi_host(endpoint: str) -> HostConfig:
    """One host of several that meet at an endpoint: the address and interface that lead there."""
    name, _, port = endpoint.rpartition(":")
    if not name or not port.isdigit():
        raise ConfigError(f"--rdzv-endpoint is {endpoint!r}.", "Give the first host and a free port: 10.0.0.1:29500")
    try:
        target = socket.gethostbyname(name)
    except OSError:
        raise ConfigError(
            f"the host {name!r} of --rdzv-endpoint has no address here.",
            "Give its IP address, or mend the name service.",
        ) from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, int(port)))  # sends nothing: it asks the kernel for the way
        except OSError as error:
            raise ConfigError(f"there is no way from here to {endpoint}: {error}.", "Look at `ip route`.") from None
        address = str(probe.getsockname()[0])
    addresses = interfaces()
    interface = next((name for name, its in addresses.items() if its == address), None)
    environment = {}
    if interface:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        environment = {name: os.environ.get(name, interface) for name in names}
    warnings = []
    if not address.startswith("127."):
        warnings.append(
            f"the processes of this run can be reached at {address} (torch's store and gloo know no password): "
            "use a private network, and a firewall against everybody else."
        )
    # A host that says nothing for ten seconds is gone; one second is too little, and a job came apart over it.
    settings = {
        "is_host": target in addresses.values(),
        "keep_alive_interval": 2,
        "keep_alive_max_attempt": 5,
        "last_call_timeout": 5,
        "join_timeout": 600,
    }
    return HostConfig(endpoint, address, settings, environment, warnings)


def interfaces() -> dict[str, str]:
    """The address of every interface of this machine that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


_SIOCGIFADDR = 0x8915


def bind_loopback(port: int) -> int:
    """A socket for torch's store that only this machine can reach; by itself it would listen on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    return listener.detach()


def join_store(place: WorldInfo, timeout: float) -> dist.Store:
    """Join the store of a run within the timeout."""
    try:
        return _open_store(place, timedelta(seconds=timeout))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "EADDRINUSE" in str(error):
            raise
        who = f"process {place.rank} of {place.size}"
        raise CollectiveTimeoutError(
            f"{who} waited {timeout:.0f} s (run.collective_timeout) for the others to start: {error}"
        ) from None


def _open_store(place: WorldInfo, patience: timedelta) -> dist.Store:
    """The store of a run. On one host it can be reached from this host alone, unless torchrun keeps one itself."""
    directory = launch_directory()
    if directory is not None and place.local_size == place.size:
        return join_private_store(directory, place.restarts, place.size, patience)
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if os.environ.get("MASTER_ADDR") == "127.0.0.1" and place.local_size == place.size and not kept:
        port = int(os.environ["MASTER_PORT"])
        listener = bind_loopback(port) if place.rank == 0 else None
        return dist.TCPStore(
            "127.0.0.1", port, place.size, place.rank == 0, timeout=patience, master_listen_fd=listener
        )
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=patience))
    # A store that is kept outlives a restart, and so would the addresses in it. One that is made for each start needs
    # no number, and hosts would not agree on it: one that came later counts its restarts from 0.
    return dist.PrefixStore(f"attempt/{place.restarts}", store) if kept else store
