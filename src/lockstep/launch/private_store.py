"""Store of a run on one host: a file that only the user can open, and gloo sockets that accept no new connections.

torch's TCPStore supports neither passwords nor Unix sockets, so any local user who connects to its port can end the
run. A FileStore in the launcher's directory (mode 0700) is protected by the file system. In torch's wheels, gloo
supports TCP only. Its listening socket accepts any connection and keeps it, until no descriptor is left. The socket is
needed only until all processes have connected to each other. After that, the kernel drops all incoming packets.
"""

import errno
import os
import socket
import stat
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
"""A packet filter program (BPF) of one instruction: return 0, which drops the packet."""


def join_private_store(directory: Path, attempt: int, size: int, timeout: timedelta) -> dist.Store:
    """Open the store of one launcher's processes and wait for all of them. Raise DistStoreError after `timeout`.

    Each attempt uses its own file, so that processes do not read addresses of an earlier attempt.
    """
    store = dist.FileStore(str(directory / f"store-{attempt}"), size)
    store.set_timeout(timeout)
    if store.add("joined", 1) == size:
        store.set("complete", "")
    if not wait_for(store, "complete", timeout.total_seconds()):
        raise dist.DistStoreError(f"only {store.add('joined', 0)} of {size} processes have joined")
    return store


def wait_for(store: dist.Store, key: str, seconds: float) -> bool:
    """Wait until a key is set; return False after `seconds`. FileStore's own wait has a resolution of seconds."""
    deadline, interval = time.monotonic() + seconds, 0.001
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
        interval = min(0.02, 2 * interval)
    return True


def is_private(store: dist.Store) -> bool:
    """Return whether a store is a FileStore, also inside PrefixStores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


@contextmanager
def sealed_sockets(backend: str) -> Iterator[None]:
    """Drop new connections to the sockets opened in the block, once it ends. All processes are connected by then."""
    before = listening_sockets()
    yield
    if backend == "gloo":  # NCCL opens connections to its sockets later, too
        drop_new_connections(listening_sockets() - before)


def listening_sockets() -> set[int]:
    """Return the listening TCP sockets of this process; empty if the system does not list descriptors."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), _duplicate(int(name)) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
                    found |= {int(name)} if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else set()
    return found


def drop_new_connections(listeners: Iterable[int]) -> None:
    """Make the kernel drop all packets to listening sockets. Accepted connections are not affected.

    The sockets stay open, because gloo's thread ends the process if its listening socket is shut down.
    """
    if sys.platform != "linux":
        return
    program = create_string_buffer(_DROP_ALL)
    for descriptor in listeners:
        with suppress(OSError), _duplicate(descriptor) as opened:
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, addressof(program)))


def _duplicate(descriptor: int) -> socket.socket:
    """Open a socket's descriptor again. Raise OSError if it is not a socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # socket.socket would not close the duplicate of another file
        raise OSError(errno.ENOTSOCK, "not a socket")
    return socket.socket(fileno=os.dup(descriptor))
