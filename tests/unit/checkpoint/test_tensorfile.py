"""Tensor files equal those of the safetensors library; hashes are computed from the data in memory."""

import hashlib
import os
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lockstep.checkpoint import format as form
from lockstep.checkpoint import tensorfile
from lockstep.checkpoint.tensorfile import _DTYPES, write_tensor_file

NAMES = ["a", "b.c", "lane-0003.task.é", 'quote"', "tab\t"]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
states = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.sampled_from(list(_DTYPES)), shapes), max_size=5)


def tensor(dtype, shape):
    return torch.arange(max(1, torch.Size(shape).numel())).to(dtype)[: torch.Size(shape).numel()].view(shape)


@given(states)
def test_tensor_file_is_byte_identical_to_safetensors(tmp_path_factory, parts):
    directory = tmp_path_factory.mktemp("files")
    state = {name: tensor(dtype, shape) for name, (dtype, shape) in parts.items()}
    save_file(state, directory / "theirs")
    digests = write_tensor_file(directory / "ours", state)
    assert (directory / "ours").read_bytes() == (directory / "theirs").read_bytes()
    assert digests == {"ours": hashlib.sha256((directory / "theirs").read_bytes()).hexdigest()}


def test_tensor_file_with_long_and_strided_tensors_round_trips(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "CHUNK", 64)
    state = {"long": torch.arange(1000), "strided": torch.arange(12.0).view(3, 4).t(), "one": torch.arange(14)[3:4]}
    write_tensor_file(tmp_path / "file", state)
    assert all(torch.equal(value, state[name]) for name, value in load_file(tmp_path / "file").items())


def test_digest_is_of_data_in_memory_not_of_file_on_disk(tmp_path, monkeypatch):
    fsync = os.fsync

    def flip(descriptor):
        """Simulate a disk or page cache that changes a byte after the write."""
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flip)
    digest = form.write_tensors(tmp_path / "tensors", {"a": torch.arange(10)})
    assert digest != form.digest_file(tmp_path / "tensors")
    digest = form.write_json(tmp_path / "values", {"a": 1})
    assert digest != form.digest_file(tmp_path / "values")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_tensor_file_mode_follows_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_tensor_file(tmp_path / "tensors", {"a": torch.ones(1)}, tmp_path / "parity")
        form.write_json(tmp_path / "values", {})
    finally:
        os.umask(before)
    for name in ("tensors", "parity", "values"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask
