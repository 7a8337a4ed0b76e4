"""Read the tensors of a file that `torch.save` wrote, as memory maps, without unpickling it.

The pickle is interpreted symbolically: calls and classes in it become plain records, and nothing is imported or called.
Tensors that any class contains can be read in this way, such as those of a TensorDict.
"""

import math
import pickletools
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.io.safe_read import open_regular

PICKLE_BYTES = 2 * 2**20
"""Size limit of the pickle, which has names and shapes."""
DTYPES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
"""NumPy dtypes of torch's storages."""
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = {"PROTO", "FRAME", "STOP"}


@dataclass
class Record:
    """A call or an object in a pickle: what would be called, with which arguments, and what is stored in it."""

    function: Any
    arguments: Any = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


def read_archive(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return the tensors of the first mapping in a file that has these names, as memory maps.

    Raises ValueError if there is none, or if the file is not a valid archive of torch.
    """
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1 or entries[pickles[0]].file_size > PICKLE_BYTES:
            raise ValueError(f"it is not a file of torch.save with at most {PICKLE_BYTES:,} bytes of names")
        found = _find(_interpret(archive.read(pickles[0])), names)
        if found is None:
            raise ValueError(f"it has no tensors named {', '.join(names)}")
        root = pickles[0].removesuffix("data.pkl")
        return {
            str(name): _tensor(path, file, entries, root, value)
            for name, value in found.items()
            if isinstance(value, Record) and value.function == ("torch._utils", "_rebuild_tensor_v2")
        }


def _interpret(data: bytes) -> Any:
    """Return the object that a pickle describes, with records instead of calls."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_mark() -> list[Any]:
        start = marks.pop()
        popped = stack[start:]
        del stack[start:]
        return popped

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case name if name in _IGNORED:
                pass
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _TUPLES:
                count = _TUPLES[name]
                values = tuple(stack[len(stack) - count :])
                del stack[len(stack) - count :]
                stack.append(values)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "GLOBAL":
                stack.append(tuple(str(argument).split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append((module, attribute))
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_mark()))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "APPEND":
                value = stack.pop()
                stack[-1].append(value)
            case "APPENDS" | "ADDITEMS":
                values_to_add = pop_mark()
                stack[-1].extend(values_to_add)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _mapping(stack[-1])[key] = value
            case "SETITEMS":
                pairs = pop_mark()
                _mapping(stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[int(argument)] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[int(argument)])
            case "BINPERSID":
                stack.append(Record("storage", stack.pop()))
            case "REDUCE" | "NEWOBJ":
                arguments = stack.pop()
                stack.append(Record(stack.pop(), arguments))
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case name:
                raise ValueError(f"its pickle has the operation {name}, which files of tensors do not need")
    if len(stack) != 1:
        raise ValueError("its pickle is not complete")
    return stack[0]


def _mapping(target: Any) -> dict[Any, Any]:
    return target.items if isinstance(target, Record) else target


def _find(root: Any, names: tuple[str, ...]) -> dict[Any, Any] | None:
    """Return the first mapping that has all names, breadth first. Shared objects are visited once."""
    queue, seen = [root], set[int]()
    for value in queue:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            if all(name in value for name in names):
                return value
            queue += list(value.values())
        elif isinstance(value, list | tuple):
            queue += list(value)
        elif isinstance(value, Record):
            queue += [value.items, value.state, value.arguments]
    return None


def _tensor(path: Path, file: Any, entries: dict[str, zipfile.ZipInfo], root: str, record: Record) -> np.ndarray:
    """Return one tensor as a memory map of its storage, which torch stores without compression."""
    storage, offset, shape, strides = record.arguments[:4]
    (_, kind), key = storage.arguments[1], storage.arguments[2]
    info = entries.get(f"{root}data/{key}")
    if info is None or info.compress_type != zipfile.ZIP_STORED or kind not in DTYPES or len(shape) != len(strides):
        raise ValueError(f"a tensor of {kind} cannot be read")
    dtype = np.dtype(DTYPES[kind])
    numbers = (offset, *shape, *strides)
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    fits = all(isinstance(n, int) and n >= 0 for n in numbers) and 0 <= last < info.file_size // dtype.itemsize
    if not fits or math.prod(shape) > path.stat().st_size:  # a stride of 0 repeats values
        raise ValueError(f"a tensor of shape {tuple(shape)[:8]} is larger than its data")
    # The local header has the lengths of the name and of the padding that follow it.
    file.seek(info.header_offset)
    header = file.read(30)
    start = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    flat = np.memmap(path, dtype, "r", start, (info.file_size // dtype.itemsize,))
    return np.lib.stride_tricks.as_strided(
        flat[offset:], tuple(shape), [stride * dtype.itemsize for stride in strides], writeable=False
    )
