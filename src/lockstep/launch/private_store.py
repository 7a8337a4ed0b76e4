"""The store of a run on one host: a file that only the user can open, and gloo sockets that take no new connections.

torch's TCPStore knows no password and no Unix socket, so any local user who connects to its port can end the run. A
FileStore in the launcher's directory (mode 0700) is protected by the file system. gloo has no other transport than TCP
in torch's wheels: its listening socket accepts anybody, and keeps every connection until no descriptor is left. It is
needed only until the processes have connected to each other; from then on the kernel drops what arrives there.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from ctypes import addressof, create_string_buffer
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of one instruction for the kernel's packet filter: return 0, take no byte of the packet."""


def join_private_store(directory: Path, attempt: int, size: int, patience: timedelta) -> dist.Store:
    """Open the store that processes of one launcher share, once all have; DistStoreError when some do not in time.

    Each start of the processes has a file of its own: addresses of an earlier start must not be found.
    """
    store = dist.FileStore(str(directory / f"store-{attempt}"), size)
    store.set_timeout(patience)
    if store.add("joined", 1) == size:
        store.set("complete", "")
    if not wait_for(store, "complete", patience.total_seconds()):
        raise dist.DistStoreError(f"only {store.add('joined', 0)} of {size} processes have joined")
    return store


def wait_for(store: dist.Store, key: str, seconds: float) -> bool:
    """Wait until a key is set; False when it is not in time. FileStore's own wait is precise to seconds only."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(0.02, 2 * pause)
    return True


def is_private(store: dist.Store) -> bool:
    """Whether a store is a file, also below prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


@contextmanager
def sealed_sockets(backend: str) -> Iterator[None]:
    """Let nobody connect to the sockets that are opened within, once it is over: all processes are connected then."""
    before = listening_sockets()
    yield
    if backend == "gloo":  # NCCL connects to its sockets later, too
        drop_new_connections(listening_sockets() - before)


def listening_sockets() -> set[int]:
    """Descriptors of this process that take TCP connections; empty where the system does not list them."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
                    found |= {int(name)} if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else set()
    return found


def drop_new_connections(listeners: Iterable[int]) -> None:
    """Have the kernel drop all that arrives at listening sockets; connections they have accepted are not affected.

    The sockets stay open: gloo's thread ends the process when one that it listens at is shut down.
    """
    if sys.platform != "linux":
        return
    program = create_string_buffer(_DROP_ALL)
    for descriptor in listeners:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, addressof(program)))
