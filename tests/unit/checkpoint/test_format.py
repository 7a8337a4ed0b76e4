"""Checkpoint format: corruption is detected, paths stay inside the directory, the hash covers logical content only."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.manifests import sealed
from lockstep.checkpoint import format as form
from lockstep.checkpoint.format import CorruptCheckpointError, digest_tensor, hash_checkpoint, verify
from lockstep.clock import TrainState
from lockstep.lanes import partition_lanes

LANES = 4
CLOCK = asdict(
    TrainState(
        total_samples=1024,
        samples=512,
        iteration=2,
        last_iteration_samples=256,
        evaluation={"return_mean": 1.5},
        best=1.5,
    )
)
each_file = pytest.mark.parametrize("name", [form.SHARED, form.VALUES, "lanes-0000-0001.safetensors"])


def shared_state():
    return {
        "algorithm.net.weight": torch.arange(24.0).view(2, 3, 2, 2),
        "algorithm.net.bias": torch.tensor([1.0, -0.0, float("inf")]),
        "algorithm.updates": torch.tensor(7),
        "task.level": torch.tensor([True, False]),
    }


def lane_state(lane):
    return {"algorithm.returns": torch.full((3,), float(lane)), "task.episode": torch.tensor([lane, 9])}


def write(directory, *, groups=2, shared=None, lanes=None, clock=CLOCK, extra=None):
    """Write a checkpoint as a run of `groups` processes does."""
    directory.mkdir(parents=True)
    states = [lane_state(lane) for lane in range(LANES)] if lanes is None else lanes
    files = {form.SHARED: form.write_tensors(directory / form.SHARED, shared_state() if shared is None else shared)}
    for group in partition_lanes(len(states), groups):
        tensors = {f"lane-{lane:04d}.{name}": x for lane in group for name, x in states[lane].items()}
        files[form.lane_file(group)] = form.write_tensors(directory / form.lane_file(group), tensors)
    values = {"format": form.FORMAT, "clock": clock, "lanes": LANES, "processes": groups} | (extra or {})
    files[form.VALUES] = form.write_json(directory / form.VALUES, values)
    form.write_manifest(directory, files, keep=False, machine={})
    return directory


def rewrite_manifest(directory, change):
    path = directory / form.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest["files"])
    path.write_text(sealed(manifest))


@pytest.fixture
def checkpoint(tmp_path):
    return write(tmp_path / "000000000512-g0001")


def hash_of(tmp_path_factory, **parts):
    return hash_checkpoint(write(tmp_path_factory.mktemp("hash") / "checkpoint", **parts))


# -------------------------------------------------------------------------------------------------- writing and reading


def test_read_shared_is_bit_identical_to_written_state(checkpoint):
    found = form.read_shared(checkpoint)
    for name, tensor in shared_state().items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert form.strip_prefix(found, "task").keys() == {"level"}
    assert form.strip_prefix(found, "algorithm").keys() == {"net.weight", "net.bias", "updates"}


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_read_lane_finds_lane_in_any_file_grouping(tmp_path, groups):
    files = verify(write(tmp_path / "a", groups=groups))["files"]
    for lane in range(LANES):
        found = form.read_lane(tmp_path / "a", lane, files)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in lane_state(lane).items()
        }


def test_read_lane_of_missing_lane_is_corrupt(checkpoint):
    with pytest.raises(CorruptCheckpointError, match="holds lane 4"):
        form.read_lane(checkpoint, LANES, verify(checkpoint)["files"])


def test_single_element_with_stride_is_written_correctly(tmp_path):
    # With one environment per lane a value is a column of a record, and a single element may have any stride.
    column = torch.arange(14).view(2, 7)[1:, 3]
    assert column.stride() == (7,)
    form.write_tensors(tmp_path / form.SHARED, form.add_prefix(task={"length": column}))
    assert form.read_shared(tmp_path)["task.length"].tolist() == [10]
    assert digest_tensor("a", column) == digest_tensor("a", torch.tensor([10]))


def test_add_prefix_copies_tensors_and_prefixes_names():
    live = torch.nn.Parameter(torch.zeros(2))
    joined = form.add_prefix(algorithm={"w": live}, task={})
    with torch.no_grad():
        live += 1
    assert {name: tensor.tolist() for name, tensor in joined.items()} == {"algorithm.w": [0, 0]}
    assert not joined["algorithm.w"].requires_grad


def test_replace_text_is_atomic_and_leaves_no_other_files(tmp_path):
    form.replace_text(tmp_path / "latest", "one")
    form.replace_text(tmp_path / "latest", "two")
    assert (tmp_path / "latest").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


# ----------------------------------------------------------------------------------------------------------- corruption


def test_verify_accepts_valid_checkpoint(checkpoint):
    assert len(verify(checkpoint)["files"]) == 4


@each_file
@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_verify_detects_changed_byte(checkpoint, name, where):
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    content[int(where * len(content)) if where >= 0 else where] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=rf"{name} is not what was written \(its SHA-256 differs\)"):
        verify(checkpoint)


@each_file
def test_verify_detects_truncated_file(checkpoint, name):
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"{name} is not what was written"):
        verify(checkpoint)


@each_file
def test_verify_detects_missing_file(checkpoint, name):
    (checkpoint / name).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{name} is missing"):
        verify(checkpoint)


def test_verify_detects_missing_manifest(checkpoint):
    (checkpoint / form.MANIFEST).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{form.MANIFEST} is missing"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "\udcff"),
        *(
            sealed({"format": form.FORMAT, "checksum": ""} | values)
            for values in ({}, {"files": []}, {"files": {}}, {"files": {"a": 1}})
        ),
    ],
)
def test_verify_detects_invalid_manifest(checkpoint, text):
    (checkpoint / form.MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptCheckpointError, match=form.MANIFEST):
        verify(checkpoint)


@pytest.mark.parametrize("needed", [form.SHARED, form.VALUES])
def test_verify_detects_manifest_without_required_file(checkpoint, needed):
    rewrite_manifest(checkpoint, lambda files: files.pop(needed))
    with pytest.raises(CorruptCheckpointError, match="does not list the files of a checkpoint"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a/../b", "./a", "a/"])
def test_verify_rejects_manifest_path_outside_checkpoint(checkpoint, name):
    # The file exists and its hash is correct, so that only its location is invalid.
    for path in (checkpoint / "a" / "b", checkpoint.parent / "x", checkpoint / "b"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("content")
    target = Path("/etc/passwd") if name.startswith("/") else checkpoint.parent / "x"
    rewrite_manifest(checkpoint, lambda files: files.update({name: form.digest_file(target)}))
    with pytest.raises(CorruptCheckpointError, match="leads out of the checkpoint"):
        verify(checkpoint)


def test_verify_rejects_symlinked_file(checkpoint):
    original = checkpoint / form.SHARED
    original.rename(checkpoint.parent / "elsewhere")
    original.symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="leads out of the checkpoint"):
        verify(checkpoint)


def test_read_lane_rejects_symlinked_file(checkpoint):
    files = verify(checkpoint)["files"]
    original = checkpoint / form.lane_file(range(0, 2))
    original.rename(checkpoint.parent / "elsewhere")
    original.symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="leads out of the checkpoint"):
        form.read_lane(checkpoint, 0, files)


def test_read_shared_of_invalid_tensor_file_is_corrupt(checkpoint):
    (checkpoint / form.SHARED).write_bytes(b"not tensors at all")
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        form.read_shared(checkpoint)


# ----------------------------------------------------------------------------------------------------------------- hash


def test_hash_is_independent_of_lane_file_grouping(tmp_path_factory):
    assert len({hash_of(tmp_path_factory, groups=groups) for groups in (1, 2, 3, 4)}) == 1


def test_hash_is_independent_of_manifest_order(checkpoint):
    before = hash_checkpoint(checkpoint)
    path = checkpoint / form.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"] = dict(reversed(manifest["files"].items()))
    path.write_text(sealed(manifest))
    assert hash_checkpoint(checkpoint) == before


def test_hash_is_independent_of_strides(tmp_path_factory):
    strided = shared_state()
    weight = strided["algorithm.net.weight"].contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    strided["algorithm.net.weight"] = weight
    assert hash_of(tmp_path_factory, shared=strided) == hash_of(tmp_path_factory)


def test_hash_is_independent_of_name_order_and_process_count(tmp_path_factory):
    reordered = dict(reversed(shared_state().items()))
    same = hash_of(tmp_path_factory, shared=reordered, clock=dict(reversed(CLOCK.items())), extra={"processes": 9})
    assert same == hash_of(tmp_path_factory)


def changes():
    """Yield every single change that must change the hash."""
    state = shared_state()
    weight = state["algorithm.net.weight"]
    for place in (0, 11, 23):
        nudged = weight.clone()
        nudged.view(-1).view(torch.int32)[place] ^= 1
        yield f"the last bit of number {place}", {"shared": state | {"algorithm.net.weight": nudged}}
    yield "a shape", {"shared": state | {"algorithm.net.weight": weight.view(3, 2, 2, 2)}}
    yield "a dtype of the same bytes", {"shared": state | {"algorithm.net.weight": weight.view(torch.int32)}}
    yield "the sign of a zero", {"shared": state | {"algorithm.net.bias": torch.tensor([1.0, 0.0, float("inf")])}}
    renamed = {name.replace("bias", "scale"): tensor for name, tensor in state.items()}
    yield "a name", {"shared": renamed}
    yield "an owner", {"shared": {name.replace("task.", "algorithm."): tensor for name, tensor in state.items()}}
    yield "one more tensor", {"shared": state | {"task.more": torch.zeros(0)}}
    yield (
        "one tensor less",
        {"shared": {name: tensor for name, tensor in state.items() if name != "task.level"}},
    )
    swapped = [lane_state(lane) for lane in (1, 0, 2, 3)]
    yield "two lanes that changed places", {"lanes": swapped}
    for name, value in {"samples": 513, "iteration": 3, "best": None, "evaluation": {"return_mean": 1.25}}.items():
        yield f"the clock's {name}", {"clock": CLOCK | {name: value}}


@pytest.mark.parametrize("parts", [pytest.param(parts, id=name) for name, parts in changes()])
def test_hash_changes_when_content_changes(parts, tmp_path_factory):
    assert hash_of(tmp_path_factory, **parts) != hash_of(tmp_path_factory)


def test_hash_of_damaged_checkpoint_is_rejected(checkpoint):
    (checkpoint / form.SHARED).unlink()
    with pytest.raises(CorruptCheckpointError):
        hash_checkpoint(checkpoint)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 2**32))
def test_digest_tensor_is_independent_of_strides(dtype, shape, seed):
    draw = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, shape, generator=draw).to(dtype)
    apart = torch.zeros(*shape, 2, dtype=dtype)
    apart[..., 0] = tensor
    strided = apart[..., 0]
    assert digest_tensor("a", strided) == digest_tensor("a", tensor)
    assert digest_tensor("b", tensor) != digest_tensor("a", tensor)
    assert digest_tensor("a", tensor.unsqueeze(0)) != digest_tensor("a", tensor)
