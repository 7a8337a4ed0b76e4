"""Check host name, interfaces, ports, and whether Weights & Biases can be reached."""

import importlib.util
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing

from lockstep.launch.rendezvous import interfaces
from lockstep.tools.doctor.finding import CheckResult, failure, ok, warning

_WANDB = ("api.wandb.ai", 443)
_TIMEOUT = 2.0


def check_network(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    """Check what processes need to connect to each other, on this host and on others."""
    found = interfaces()
    yield ok("network", f"interfaces: {', '.join(f'{name} {address}' for name, address in found.items())}")
    name = socket.gethostname()
    try:
        yield ok("network", f"host {name} is {socket.gethostbyname(name)}")
    except OSError:
        yield warning(
            "network",
            f"the host name {name} has no address, but torchrun on several hosts and older gloo look it up",
            f"Add it to /etc/hosts (127.0.1.1 {name}), or give addresses instead of names.",
        )
    yield from _ports(environment)
    yield from _wandb(environment)


def _ports(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    try:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield failure(
            "network",
            f"cannot open a port on 127.0.0.1: {error}",
            "Bring the loopback interface up: ip link set lo up",
        )
        return
    port = environment.get("MASTER_PORT", "")
    if port.isdigit():
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                yield failure(
                    "network",
                    f"MASTER_PORT={port} is in use by another program",
                    "unset MASTER_PORT; `lockstep train --procs N` finds a free one. With torchrun: --standalone.",
                )
                return
    yield ok("network", "ports can be opened on 127.0.0.1")


def _wandb(environment: Mapping[str, str]) -> Iterator[CheckResult]:
    if importlib.util.find_spec("wandb") is None:
        yield ok("wandb", "not installed: nothing is sent anywhere")
        return
    mode = environment.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        yield ok("wandb", f"{mode}, by WANDB_MODE")
        return
    try:
        socket.create_connection(_WANDB, timeout=_TIMEOUT).close()
    except OSError as error:
        yield warning(
            "wandb",
            f"{_WANDB[0]} cannot be reached: {error}",
            "export WANDB_MODE=offline, and upload runs later with `wandb sync`.",
        )
    else:
        yield ok("wandb", f"{_WANDB[0]} can be reached")
