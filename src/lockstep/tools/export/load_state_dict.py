"""Read tensors from untrusted files without executing code. This is the only module that opens a pickle.

`torch.load(weights_only=True)` accepts only tensors and plain containers, but it does not limit time and memory.
Therefore this module first compares sizes in the file with the size of the file, and then validates the tensors.
"""

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor

from lockstep.io.safe_read import open_regular

FILE_BYTES = 4 * 2**30
"""Size limit of a file of weights in bytes."""
TENSORS = 10_000
"""Largest number of tensors in a file: a network of 5,000 layers."""
PICKLE_BYTES, HEADER_BYTES = 2 * 2**20, 4 * 2**20
"""Size limits in bytes of the metadata of tensors: names, shapes and settings."""
DIRECTORY_BYTES = 8 * 2**20
"""Size limit of a zip's central directory in bytes. An entry has about 100 bytes, more with a long name."""

_METADATA = (".__batch_size", ".__device")
"""Ends of the names of entries that tensordict adds to a state dict. They are not tensors."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a state dict saved by torch. Raises ValueError for anything else."""
    with open_regular(path) as file:
        _refuse_large(file)
        return read_torch(file)


def read_torch(file: IO[bytes]) -> dict[str, Tensor]:
    """Read the tensors of a state dict from an open file. The caller has checked its size."""
    _refuse_bombs(file)
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about tensor types that are refused below
            found = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # refused pickle or invalid zip: torch raises many types
        raise ValueError(f"torch cannot load it with weights_only=True ({_reason(error)})") from None
    for name in ("state_dict", "model"):  # some libraries nest the state dict
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if not isinstance(found, dict):
        raise ValueError("it is not a state dict")
    return checked({name: value for name, value in found.items() if not str(name).endswith(_METADATA)})


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and metadata of a safetensors file. Raises ValueError for anything else."""
    with open_regular(path) as file:
        _refuse_large(file)
        header = int.from_bytes(file.read(8), "little")
    if header > HEADER_BYTES:
        raise ValueError(f"its header has {header:,} bytes, more than the limit of {HEADER_BYTES:,}")
    with safe_open(str(path), framework="pt") as tensors:
        names = list(tensors.keys())
        _refuse_many(len(names))
        return checked({name: tensors.get_tensor(name) for name in names}), dict(tensors.metadata() or {})


def checked(tensors: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Validate tensors by name. Raises ValueError for other types, non-finite values and sizes beyond their data."""
    _refuse_many(len(tensors))
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError("it is not a state dict")
        short_name = name[:100]
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
            raise ValueError(f"{short_name} is not a dense real CPU tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # a stride of 0 repeats values
            raise ValueError(f"{short_name} claims to be larger than its data")
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    if sum(tensor.nbytes for tensor in tensors.values()) > 4 * sum(storages.values()):
        raise ValueError("its tensors share data, and together are much larger than the file")
    for name, tensor in tensors.items():
        values = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name[:100]} has non-finite values")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _reason(error: Exception) -> str:
    """Return torch's reason to refuse a file, without its advice to load the file unsafely."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[1 if lines[0].startswith("Weights only load failed") and len(lines) > 1 else 0][:200].rstrip(".")


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def entries(file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of a zip by name. Raises ValueError for encrypted entries and unknown compression."""
    for info in file.infolist():
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"its entry {info.filename[:100]!r} is encrypted or has an unknown compression")
    return {info.filename: info for info in file.infolist()}


def open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip if its central directory is small, because Python keeps 500 bytes of memory for each entry."""
    size = _directory_bytes(file)
    if size > DIRECTORY_BYTES:
        raise ValueError(f"its central directory has {size:,} bytes, more than the limit of {DIRECTORY_BYTES:,}")
    return zipfile.ZipFile(file)


def _directory_bytes(file: IO[bytes]) -> int:
    """Return the size of a zip's central directory from the end record (a comment of up to 64 KiB may follow it)."""
    end = file.seek(0, 2)
    file.seek(max(0, end - 2**16 - 22))
    tail = file.read()
    start = tail.rfind(b"PK\x05\x06")
    if start < 0 or len(tail) - start < 22:
        raise ValueError("it is not a zip file, which torch saves since version 1.6")
    size = int.from_bytes(tail[start + 12 : start + 16], "little")
    offset = int.from_bytes(tail[start + 16 : start + 20], "little")
    if size == 2**32 - 1 or offset == 2**32 - 1:  # zip64: the sizes are in another record, which torch also writes
        record = tail.rfind(b"PK\x06\x06", 0, start)
        if record < 0 or len(tail) - record < 56:
            raise ValueError("it is not a zip file")
        size = int.from_bytes(tail[record + 40 : record + 48], "little")
    return size


def _refuse_bombs(file: IO[bytes]) -> None:
    """Refuse a torch file that expands beyond its size on disk. torch stores without compression."""
    file_bytes = file.seek(0, 2)
    with open_zip(file) as archive:
        entries(archive)
        if sum(info.file_size for info in archive.infolist()) > file_bytes:
            raise ValueError("its entries are larger than the file")
        for info in archive.infolist():
            if info.filename.endswith(".pkl") and info.file_size > PICKLE_BYTES:
                raise ValueError(f"its pickle has {info.file_size:,} bytes, more than the limit of {PICKLE_BYTES:,}")


def _refuse_large(file: IO[bytes]) -> None:
    if file.seek(0, 2) > FILE_BYTES:
        raise ValueError(f"it has more than {FILE_BYTES // 2**30} GiB")
    file.seek(0)


def _refuse_many(count: int) -> None:
    if count > TENSORS:
        raise ValueError(f"it has {count:,} tensors, more than the limit of {TENSORS:,}")
