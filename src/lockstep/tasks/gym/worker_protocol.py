"""Protocol between a process and its workers: short messages on a socket, and arrays in shared memory.

No message is ever executed as code.
"""

import io
import math
import mmap
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_HEADER = struct.Struct("<cqq")


class Request:
    """Kinds of requests to a worker."""

    SETTINGS, BEGIN, STEP, REPLAY, TEXT, FRAME = b"c", b"b", b"s", b"r", b"t", b"f"


class Response:
    """Kinds of responses: done; refused, with the reason; or failed, with the traceback."""

    DONE, REFUSED, FAILED = b".", b"?", b"!"


class Message(NamedTuple):
    """A request or a response."""

    kind: bytes
    number: int = 0
    """A row, or the number of a worker."""
    body: bytes = b""


def send(channel: socket.socket, message: Message) -> None:
    channel.sendall(_HEADER.pack(message.kind, message.number, len(message.body)) + message.body)


def receive(channel: socket.socket) -> Message | None:
    """Return the next message, or None if the other side closed the connection."""
    header = _receive_bytes(channel, _HEADER.size)
    if header is None:
        return None
    kind, number, length = _HEADER.unpack(header)
    body = _receive_bytes(channel, length) if length else b""
    return None if body is None else Message(kind, number, body)


def _receive_bytes(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        try:
            part = channel.recv(min(size, 1 << 20))
        except ConnectionResetError:  # the other side exited with unread data
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pack(arrays: Mapping[int, Any]) -> bytes:
    """Serialize arrays by row, with their dtypes and shapes, in NumPy's file format."""
    file = io.BytesIO()
    np.savez(file, **{str(row): array for row, array in arrays.items()})
    return file.getvalue()


def unpack(body: bytes) -> dict[int, np.ndarray]:
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return {int(row): array for row, array in arrays.items()}


# Arrays in shared memory


def layout_of(tree: Any) -> Any:
    """Return the dtypes and shapes of a tree of arrays, as JSON values."""
    if isinstance(tree, dict):
        return {name: layout_of(part) for name, part in tree.items()}
    return [tree.dtype.str, *tree.shape]


def size_of(layout: Any) -> int:
    """Return the number of bytes that the arrays of a layout need."""
    if isinstance(layout, dict):
        return sum(size_of(part) for part in layout.values())
    dtype, *shape = layout
    return math.ceil(math.prod(shape) * np.dtype(dtype).itemsize / 64) * 64  # whole cache lines: all are aligned


def lay_out(layout: Any, memory: mmap.mmap, rows: slice, start: int = 0) -> Any:
    """Map the arrays of a layout to consecutive parts of the memory. Return some of their rows, without a copy."""
    if isinstance(layout, dict):
        tree = {}
        for name, part in layout.items():
            tree[name] = lay_out(part, memory, rows, start)
            start += size_of(part)
        return tree
    dtype, *shape = layout
    return np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)[rows]
