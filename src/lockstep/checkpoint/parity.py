"""Parity files: repair damaged blocks of a file that several checkpoints share.

The file is cut into blocks. Block i belongs to stripe i modulo the number of stripes, and the parity of a stripe is the
XOR of its blocks, so one damaged block of each stripe can be computed from the others. Neighboring blocks are in
different stripes, so any damaged range of up to a tenth of the file can be repaired. CRC-32 finds the damaged blocks.
The SHA-256 of the whole file in the manifest confirms the result.

Layout, little endian: MAGIC, size of the file (8 bytes), CRC-32 of the table (4), the table (the CRC-32 of each block,
then of each stripe's parity), and the parity of each stripe.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK, GROUP = 4096, 10
"""Bytes of a block, and blocks of a stripe: parity takes a tenth of the file."""
MAGIC = b"LSPARITY"
_HEAD = struct.Struct("<8sQI")
_CHUNK = 256 * BLOCK


class Parity:
    """Parity of a file of known size, computed incrementally while the file is written or read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks = -(-size // BLOCK)
        self.stripes = max(1, -(-self.blocks // GROUP))
        self.fold = np.zeros(self.stripes * BLOCK, np.uint8)
        """[stripes x BLOCK]: byte i of the file belongs to byte i modulo its length."""
        self.checks = np.zeros(self.blocks + self.stripes, "<u4")
        self._position = 0

    def update(self, part: bytes | memoryview) -> None:
        """Add the next bytes of the file."""
        data, view, position = np.frombuffer(part, np.uint8), memoryview(part), self._position
        done = 0
        while done < len(data):
            offset = (position + done) % len(self.fold)
            count = min(len(data) - done, len(self.fold) - offset)
            self.fold[offset : offset + count] ^= data[done : done + count]
            done += count
        done = 0
        while done < len(data):
            block, offset = divmod(position + done, BLOCK)
            count = min(len(data) - done, BLOCK - offset)
            self.checks[block] = zlib.crc32(view[done : done + count], int(self.checks[block]))
            done += count
        self._position += len(data)

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the parity file. Call after `update` has received the whole file."""
        self.checks[self.blocks :] = [zlib.crc32(stripe.data) for stripe in self.fold.reshape(-1, BLOCK)]
        yield _HEAD.pack(MAGIC, self.size, zlib.crc32(self.checks.data))
        yield self.checks.data.cast("B")
        yield self.fold.data


def parity_of(path: Path) -> Parity:
    """Compute the parity of a file on disk."""
    parity = Parity(path.stat().st_size)
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            parity.update(part)
    return parity


def repair(path: Path, parity: Path, digest: str) -> int:
    """Repair a damaged file in place.

    Only damaged blocks are written, and the parity file does not change. After a crash in between, the file can still
    be repaired. The file keeps its inode, so every hard link to it is repaired.

    Args:
        path: The damaged file.
        parity: Its parity file, which may itself be damaged in part.
        digest: SHA-256 of the file as it was written.

    Returns:
        Number of repaired blocks; 0 if the damage is too large, in which case nothing is written.
    """
    known = _read(parity)
    if known is None:
        return 0
    with path.open("rb") as file:
        blocks = enumerate(_blocks(file.fileno(), known, {}))
        bad = [block for block, content in blocks if zlib.crc32(content) != known.checks[block]]
        if len({block % known.stripes for block in bad}) < len(bad):
            return 0
        repaired = {block: _rebuild(file.fileno(), known, block) for block in bad}
        sha256 = hashlib.sha256()
        for part in _blocks(file.fileno(), known, repaired):
            sha256.update(part)
    resized = path.stat().st_size != known.size
    if sha256.hexdigest() != digest or not (repaired or resized):
        return 0
    with path.open("r+b") as file:
        for block, content in repaired.items():
            file.seek(block * BLOCK)
            file.write(content)
        file.truncate(known.size)
        file.flush()
        os.fsync(file.fileno())
    return max(1, len(repaired))


def _read(path: Path) -> Parity | None:
    """Read a parity file; None if its header or table is damaged."""
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            magic, size, check = _HEAD.unpack(file.read(_HEAD.size))
            # Parity is a tenth of the size of its file. Checking this bounds the memory that the header can request.
            if magic != MAGIC or size > 2 * GROUP * length:
                return None
            known = Parity(size)
            table = file.read(known.checks.nbytes)
            known.checks = np.frombuffer(table, "<u4")
            fold = np.frombuffer(file.read(known.fold.nbytes), np.uint8)
    except (FileNotFoundError, struct.error, ValueError):
        return None
    if zlib.crc32(table) != check or len(known.checks) != known.blocks + known.stripes:
        return None
    known.fold[: len(fold)] = fold
    return known


def _rebuild(file: int, known: Parity, block: int) -> bytes:
    """Compute a block from the other blocks of its stripe and the parity."""
    stripe = block % known.stripes
    content = known.fold[stripe * BLOCK : (stripe + 1) * BLOCK].copy()
    for other in range(stripe, known.blocks, known.stripes):
        if other != block:
            part = np.frombuffer(os.pread(file, _length(known, other), other * BLOCK), np.uint8)
            content[: len(part)] ^= part
    return content[: _length(known, block)].tobytes()


def _blocks(file: int, known: Parity, repaired: dict[int, bytes]) -> Iterator[bytes]:
    """Yield the blocks of a file in order, some of them replaced. A block beyond the end of the file is shorter."""
    for start in range(0, known.blocks * BLOCK, _CHUNK):
        chunk = os.pread(file, min(_CHUNK, known.size - start), start)
        for offset in range(0, min(_CHUNK, known.size - start), BLOCK):
            block = (start + offset) // BLOCK
            yield repaired.get(block, chunk[offset : offset + BLOCK])


def _length(known: Parity, block: int) -> int:
    return min(BLOCK, known.size - block * BLOCK)
