"""Parity files: repairable corruption, no incorrect repairs, and repairs in place for hard links."""

import hashlib
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.checkpoint.parity import _HEAD, BLOCK, GROUP, MAGIC, Parity, parity_of, repair
from lockstep.checkpoint.tensorfile import write_bytes

SIZE = 33 * BLOCK + 77


def content(size, seed=0):
    return hashlib.shake_128(str(seed).encode()).digest(size)


@pytest.fixture
def pair(tmp_path):
    """A file, its parity file, its hash and its bytes."""
    data, path, parity = content(SIZE), tmp_path / "data", tmp_path / "data.parity"
    fold = Parity(SIZE)
    digest = write_bytes(path, [data[:5], data[5:9000], data[9000:]], fold)
    write_bytes(parity, fold.parts())
    return path, parity, digest, data


def damage(path, start, count):
    data = bytearray(path.read_bytes())
    data[start : start + count] = bytes(byte ^ 0xFF for byte in data[start : start + count])
    path.write_bytes(data)


def test_parity_size_is_about_one_tenth(pair):
    path, parity, *_ = pair
    assert parity.stat().st_size < path.stat().st_size / GROUP + 2 * BLOCK


@given(st.integers(1, 5 * BLOCK), st.data())
def test_parity_is_independent_of_update_chunks(size, draw):
    data = content(size)
    cuts = sorted(draw.draw(st.lists(st.integers(0, size), max_size=5)))
    folds = [Parity(size), Parity(size)]
    folds[0].update(data)
    for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
        folds[1].update(data[start:stop])
    assert b"".join(folds[0].parts()) == b"".join(folds[1].parts())


@pytest.mark.parametrize("start", [0, 1, BLOCK - 1, BLOCK, 7 * BLOCK + 3, SIZE - 1])
def test_repair_of_one_flipped_byte_restores_file(pair, start):
    path, parity, digest, data = pair
    damage(path, start, 1)
    assert repair(path, parity, digest) == 1
    assert path.read_bytes() == data


@pytest.mark.parametrize("start", [0, 10 * BLOCK, 29 * BLOCK])
def test_repair_of_damaged_tenth_restores_file(pair, start):
    path, parity, digest, data = pair
    damage(path, start, Parity(SIZE).stripes * BLOCK)
    assert repair(path, parity, digest) == 4
    assert path.read_bytes() == data


def test_repair_of_truncated_or_extended_file_restores_it(pair):
    path, parity, digest, data = pair
    os.truncate(path, SIZE - 2 * BLOCK)
    assert repair(path, parity, digest) == 3  # one of the three blocks was truncated
    assert path.read_bytes() == data
    path.write_bytes(data + b"more")
    assert repair(path, parity, digest)
    assert path.read_bytes() == data


def test_repair_keeps_hard_links(pair, tmp_path):
    path, parity, digest, data = pair
    os.link(path, tmp_path / "link")
    damage(path, 5, 1)
    assert repair(path, parity, digest)
    assert (tmp_path / "link").read_bytes() == data
    assert path.stat().st_ino == (tmp_path / "link").stat().st_ino


def test_repair_of_two_blocks_in_one_stripe_writes_nothing(pair):
    path, parity, digest, _ = pair
    stripes = Parity(SIZE).stripes
    damage(path, 0, 1)
    damage(path, stripes * BLOCK, 1)
    before = path.read_bytes()
    assert repair(path, parity, digest) == 0
    assert path.read_bytes() == before


def test_repair_with_wrong_hash_writes_nothing(pair):
    path, parity, _, _ = pair
    damage(path, 0, 1)
    before = path.read_bytes()
    assert repair(path, parity, "0" * 64) == 0
    assert path.read_bytes() == before


def test_repair_with_damaged_parity_of_other_stripe_succeeds(pair):
    path, parity, digest, data = pair
    damage(parity, parity.stat().st_size - 1, 1)
    damage(path, 0, 1)
    assert repair(path, parity, digest) == 1
    assert path.read_bytes() == data


def test_repair_with_damaged_parity_of_same_stripe_fails(pair):
    path, parity, digest, _ = pair
    damage(parity, parity.stat().st_size - 1, 1)
    damage(path, (Parity(SIZE).stripes - 1) * BLOCK + BLOCK - 1, 1)
    assert repair(path, parity, digest) == 0


@pytest.mark.parametrize(
    "text",
    [b"", b"x", b"x" * 100, _HEAD.pack(MAGIC, 2**60, 0), _HEAD.pack(MAGIC, SIZE, 1) + b"\0" * 20000, MAGIC],
)
def test_repair_with_invalid_parity_file_fails(pair, text):
    path, parity, digest, _ = pair
    damage(path, 0, 1)
    parity.write_bytes(text)
    assert repair(path, parity, digest) == 0
    parity.unlink()
    assert repair(path, parity, digest) == 0


def test_repair_with_truncated_parity_file_uses_the_rest(pair):
    path, parity, digest, data = pair
    os.truncate(parity, parity.stat().st_size - BLOCK)
    damage(path, 0, 1)
    assert repair(path, parity, digest) == 1
    assert path.read_bytes() == data


def test_parity_of_file_equals_streamed_parity(pair):
    path, parity, *_ = pair
    assert b"".join(parity_of(path).parts()) == parity.read_bytes()


def test_parity_header_matches_documented_layout(pair):
    _, parity, *_ = pair
    assert struct.unpack("<8sQ", parity.read_bytes()[:16]) == (b"LSPARITY", SIZE)
