"""Tensors of foreign files, read without running anything: the only place where lockstep opens a pickle.

torch's own reader of weights knows tensors and plain containers, and refuses a file that names anything else. What it
does not do is here: it takes the time and the memory that a file asks for. So sizes are compared with the size of the
file first, and tensors are checked to be what a state dict holds.
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
"""The largest file of weights that is read."""
TENSORS = 10_000
"""The most tensors a file may hold: a network of 5,000 layers."""
PICKLE_BYTES, HEADER_BYTES = 2 * 2**20, 4 * 2**20
"""What a file may say about its tensors: names, shapes and settings."""
DIRECTORY_BYTES = 8 * 2**20
"""The table of contents of a zip: 100 bytes for each of its files, and more for long names."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict that torch saved, by name; ValueError for anything else."""
    with open_regular(path) as file:
        _refuse_large(file)
        return read_torch(file)


def read_torch(file: IO[bytes]) -> dict[str, Tensor]:
    """The same for an open file whose size is known to be small enough."""
    _refuse_bombs(file)
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that are refused below
            found = torch.load(file, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a pickle that it refuses, a zip that is none: whatever torch has to say
        raise ValueError(f"torch does not read it as weights alone ({_reason(error)})") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]  # as several libraries wrap it
    if not isinstance(found, dict):
        raise ValueError("it is no state dict")
    return checked(found)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata; ValueError for anything else."""
    with open_regular(path) as file:
        _refuse_large(file)
        header = int.from_bytes(file.read(8), "little")
    if header > HEADER_BYTES:
        raise ValueError(f"it says {header:,} bytes about its tensors, more than the {HEADER_BYTES:,} it may")
    with safe_open(str(path), framework="pt") as tensors:
        names = list(tensors.keys())
        _refuse_many(len(names))
        return checked({name: tensors.get_tensor(name) for name in names}), dict(tensors.metadata() or {})


def checked(tensors: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Tensors by name; ValueError for what a state dict does not hold, or what is larger than its bytes in the file."""
    _refuse_many(len(tensors))
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError("it is no state dict")
        shown = name[:100]
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
            raise ValueError(f"{shown} is no plain tensor of numbers")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():  # a stride of 0 repeats values
            raise ValueError(f"{shown} says it is larger than its data")
    shared = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    if sum(tensor.nbytes for tensor in tensors.values()) > 4 * sum(shared.values()):
        raise ValueError("its tensors are views of the same data, and together much larger than the file")
    for name, tensor in tensors.items():
        values = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name[:100]} has values that are not finite")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _reason(error: Exception) -> str:
    """What torch objected to; before that, it explains how to load the file without protection."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[1 if lines[0].startswith("Weights only load failed") and len(lines) > 1 else 0][:200].rstrip(".")


def first_line(error: BaseException) -> str:
    """The beginning of an error, as one line of a message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def entries(file: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The files in a zip by name, without passwords and in formats that Python reads."""
    found = {}
    for info in file.infolist():
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename[:100]!r} in it is encrypted, or compressed in an unknown way")
        found[info.filename] = info
    return found


def open_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """A zip whose table of contents is small; Python reads the whole table, and keeps 500 bytes for each entry."""
    size = _directory_bytes(file)
    if size > DIRECTORY_BYTES:
        raise ValueError(f"its table of contents has {size:,} bytes, more than the {DIRECTORY_BYTES:,} it may")
    return zipfile.ZipFile(file)


def _directory_bytes(file: IO[bytes]) -> int:
    """The size of a zip's table of contents, from the record at its end (which a comment of 64 KiB may follow)."""
    end = file.seek(0, 2)
    file.seek(max(0, end - 2**16 - 22))
    tail = file.read()
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) - place < 22:
        raise ValueError("it is no zip, which is what torch saves since version 1.6")
    size = int.from_bytes(tail[place + 12 : place + 16], "little")
    offset = int.from_bytes(tail[place + 16 : place + 20], "little")
    if size == 2**32 - 1 or offset == 2**32 - 1:  # the true numbers are in another record, which torch writes, too
        record = tail.rfind(b"PK\x06\x06", 0, place)
        if record < 0 or len(tail) - record < 56:
            raise ValueError("it is no zip")
        size = int.from_bytes(tail[record + 40 : record + 48], "little")
    return size


def _refuse_bombs(file: IO[bytes]) -> None:
    """Refuse a file of torch's that would be larger in memory than on disk; torch stores without compression."""
    whole = file.seek(0, 2)
    with open_zip(file) as archive:
        entries(archive)
        if sum(info.file_size for info in archive.infolist()) > whole:
            raise ValueError("the parts of it are larger than the file")
        for info in archive.infolist():
            if info.filename.endswith(".pkl") and info.file_size > PICKLE_BYTES:
                raise ValueError(f"it says {info.file_size:,} bytes about its tensors, more than {PICKLE_BYTES:,}")


def _refuse_large(file: IO[bytes]) -> None:
    if file.seek(0, 2) > FILE_BYTES:
        raise ValueError(f"it has more than {FILE_BYTES // 2**30} GiB")
    file.seek(0)


def _refuse_many(count: int) -> None:
    if count > TENSORS:
        raise ValueError(f"it holds {count:,} tensors, more than the {TENSORS:,} it may")
