"""Safetensors files: written as a stream and hashed from memory, read with size limits.

The hash is computed from the bytes in memory. A hash of the file as read back would accept a byte that changed between
memory and disk. Streaming needs one extra tensor of memory at most, and files follow the umask.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import safetensors
import torch
from torch import Tensor

from lockstep.checkpoint.errors import CorruptCheckpointError
from lockstep.checkpoint.parity import Parity
from lockstep.io.safe_read import UnreadableFileError, open_regular
from lockstep.protocols import StateDict

CHUNK = 4 * 2**20
"""Bytes hashed and written at a time. Small enough that they are still in the CPU cache when they are written."""
HEADER_BYTES = 16 * 2**20
"""Maximum header size: enough for 100,000 tensors. Parsing a header of this size takes less than 512 MiB."""
MAX_MEMORY_MULTIPLE = 16
"""Maximum file size as a multiple of this machine's memory. A larger machine may have written the file."""
# In the order in which the safetensors library sorts tensors: largest alignment first, then by name.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: position for position, dtype in enumerate(_DTYPES)}


def write_tensor_file(path: Path, tensors: StateDict, parity: Path | None = None) -> dict[str, str]:
    """Write named tensors durably as a safetensors file.

    Args:
        path: The file. An existing file is overwritten.
        tensors: Tensors in host memory, with any strides.
        parity: Path of a parity file to write as well.

    Returns:
        The SHA-256 of the bytes in memory, by file name.
    """
    head, ordered, size = _layout(tensors)
    fold = Parity(len(head) + size) if parity is not None else None
    digests = {path.name: write_bytes(path, _parts(head, ordered), fold)}
    if parity is not None and fold is not None:
        digests[parity.name] = write_bytes(parity, fold.parts())
    return digests


def digest_tensors(tensors: StateDict) -> str:
    """Return the SHA-256 of the file that `write_tensor_file` would write."""
    head, ordered, _ = _layout(tensors)
    digest = hashlib.sha256()
    for part in _parts(head, ordered):
        digest.update(part)
    return digest.hexdigest()


def write_bytes(path: Path, parts: Iterable[bytes | memoryview], parity: Parity | None = None) -> str:
    """Write a file durably; return the SHA-256 of the bytes in memory, not of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            if parity is not None:
                parity.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _layout(tensors: StateDict) -> tuple[bytes, list[tuple[str, Tensor]], int]:
    """Return the header of a file, the tensors in the order of the file, and their number of bytes."""
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    header, stop = {}, 0
    for name, tensor in ordered:
        start, stop = stop, stop + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, ordered, stop


def _parts(head: bytes, tensors: list[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    yield head
    for _, tensor in tensors:
        content = bytes_of(tensor)
        for start in range(0, len(content), CHUNK):
            yield content[start : start + CHUNK]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the logical bytes of a tensor in host memory; copy only if it is not contiguous."""
    tensor = tensor.detach().contiguous()
    # A single element counts as contiguous with any stride, but view(uint8) needs stride 1.
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def read_tensor_file(path: Path, prefix: str | None) -> StateDict:
    """Memory-map the tensors of a file, or those whose names begin with a prefix, which is removed."""
    try:
        check_file_size(path)
        with open_regular(path) as file:
            header = int.from_bytes(file.read(8), "little")
        if header > HEADER_BYTES:
            raise ValueError(f"its header has {header:,} bytes, more than the maximum of {HEADER_BYTES:,}")
        with safetensors.safe_open(path, framework="pt") as tensors:
            names = [name for name in tensors.keys() if prefix is None or name.startswith(prefix)]  # noqa: SIM118
            return {name.removeprefix(prefix or ""): tensors.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path} is missing") from None
    except (UnreadableFileError, safetensors.SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {str(error).partition(chr(10))[0][:300]}") from None


def check_file_size(path: Path) -> None:
    """Reject a file much larger than the memory of a host before reading it: checkpoints are copies of memory."""
    size, memory = path.stat().st_size, psutil.virtual_memory().total
    if size > MAX_MEMORY_MULTIPLE * memory:
        raise CorruptCheckpointError(f"{path} holds {size:,} bytes, and this machine has {memory:,} bytes of memory")
