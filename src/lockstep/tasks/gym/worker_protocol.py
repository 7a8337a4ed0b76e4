"""What passes between a process and its workers: short messages on a socket, and arrays in memory both can see.

Nothing that is read here can be run as code.
"""

import io
import math
import mmap
import socket
import struct
from typing import Any, NamedTuple

import numpy as np

_HEAD = struct.Struct("<cqq")


class Request:
    """What is asked of a worker."""

    SETTINGS, BEGIN, STEP, REPLAY, TEXT, FRAME = b"c", b"b", b"s", b"r", b"t", b"f"


class Response:
    """What a worker says: it is done; it cannot be done, and why; or the worker fails, and its traceback."""

    DONE, REFUSED, FAILED = b".", b"?", b"!"


class Message(NamedTuple):
    """An order or an answer."""

    kind: bytes
    number: int = 0
    """A row, or how many."""
    body: bytes = b""


def send(channel: socket.socket, message: Message) -> None:
    channel.sendall(_HEAD.pack(message.kind, message.number, len(message.body)) + message.body)


def receive(channel: socket.socket) -> Message | None:
    """The next message; None when the other side is gone."""
    head = _receive_bytes(channel, _HEAD.size)
    if head is None:
        return None
    kind, number, length = _HEAD.unpack(head)
    body = _receive_bytes(channel, length) if length else b""
    return None if body is None else Message(kind, number, body)


def _receive_bytes(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        try:
            part = channel.recv(min(size, 1 << 20))
        except ConnectionResetError:  # gone in the middle of its own reading
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def pack(array: np.ndarray) -> bytes:
    """An array with its dtype and shape, as numpy writes it to a file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def unpack(body: bytes) -> np.ndarray:
    array: np.ndarray = np.load(io.BytesIO(body), allow_pickle=False)
    return array


# Arrays in shared memory


def layout_of(tree: Any) -> Any:
    """The dtypes and shapes of a tree of arrays, as JSON can say them."""
    if isinstance(tree, dict):
        return {name: layout_of(part) for name, part in tree.items()}
    return [tree.dtype.str, *tree.shape]


def size_of(layout: Any) -> int:
    """How many bytes the arrays of a layout take."""
    if isinstance(layout, dict):
        return sum(size_of(part) for part in layout.values())
    dtype, *shape = layout
    return math.ceil(math.prod(shape) * np.dtype(dtype).itemsize / 64) * 64  # whole cache lines: all are aligned


def lay_out(layout: Any, memory: mmap.mmap, start: int = 0) -> Any:
    """The arrays of a layout, one behind the other in the memory."""
    if isinstance(layout, dict):
        tree = {}
        for name, part in layout.items():
            tree[name] = lay_out(part, memory, start)
            start += size_of(part)
        return tree
    dtype, *shape = layout
    return np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
