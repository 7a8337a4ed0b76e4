"""Host name, interfaces, ports, and whether Weights & Biases can be reached."""

import importlib.util
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing

from lockstep.doctor.line import Line, advice, trouble, well
from lockstep.runtime.hosts import interfaces

_WANDB = ("api.wandb.ai", 443)
_PATIENCE = 2.0


def check_network(environment: Mapping[str, str]) -> Iterator[Line]:
    """What processes need to find each other, here and on other hosts."""
    found = interfaces()
    yield well("network", f"interfaces: {', '.join(f'{name} {address}' for name, address in found.items())}")
    name = socket.gethostname()
    try:
        yield well("network", f"host {name} is {socket.gethostbyname(name)}")
    except OSError:
        yield advice(
            "network",
            f"the host name {name} has no address: torchrun on several hosts, and older gloo, look it up",
            f"Add it to /etc/hosts (127.0.1.1 {name}), or give addresses instead of names.",
        )
    yield from _ports(environment)
    yield from _wandb(environment)


def _ports(environment: Mapping[str, str]) -> Iterator[Line]:
    try:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        yield trouble(
            "network",
            f"no port can be opened on 127.0.0.1: {error}",
            "Bring the loopback interface up: ip link set lo up",
        )
        return
    wanted = environment.get("MASTER_PORT", "")
    if wanted.isdigit():
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", int(wanted))) == 0:
                yield trouble(
                    "network",
                    f"MASTER_PORT={wanted} is in use by another program",
                    "unset MASTER_PORT; `lockstep train --procs N` finds a free one. With torchrun: --standalone.",
                )
                return
    yield well("network", "ports can be opened on 127.0.0.1")


def _wandb(environment: Mapping[str, str]) -> Iterator[Line]:
    if importlib.util.find_spec("wandb") is None:
        yield well("wandb", "not installed: nothing is sent anywhere")
        return
    mode = environment.get("WANDB_MODE", "online")
    if mode in ("offline", "disabled", "dryrun"):
        yield well("wandb", f"{mode}, by WANDB_MODE")
        return
    try:
        socket.create_connection(_WANDB, timeout=_PATIENCE).close()
    except OSError as error:
        yield advice(
            "wandb",
            f"{_WANDB[0]} cannot be reached: {error}",
            "export WANDB_MODE=offline, and send runs later with `wandb sync`.",
        )
    else:
        yield well("wandb", f"{_WANDB[0]} can be reached")
