"""Untrusted run files: invalid ones are refused with a message and have no other effect.

The hashes of a checkpoint detect damage. A malicious file comes with valid hashes, so most of these files are signed
again after the change. Then only the validation of the reader protects the run.
"""

import contextlib
import json
import os
import resource
import shutil
import struct
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.logs import last_values
from helpers.manifests import sealed
from helpers.multiprocess import together
from helpers.tiny_recipes import ITERATION, checkpoints_of, hash_of, tiny
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import best_checkpoint, find, lineage
from lockstep.checkpoint.tensorfile import HEADER_BYTES
from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.inference import load, load_recipe
from lockstep.io.jsonl import CHECKPOINTS, truncate_after
from lockstep.lanes import Lanes
from lockstep.tasks.gym.env import GymConfig
from lockstep.training_loop import train

LANES = "lanes-0000-0007.safetensors"
BODY = b"\0" * 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two iterations, with a checkpoint at each."""
    directory = tmp_path_factory.mktemp("trained")
    train(tiny(directory, total_samples=2 * ITERATION))
    return directory / "run"


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def newest(run):
    return run / CHECKPOINTS / str(lineage(run / CHECKPOINTS)[0])


def sign(checkpoint):
    """Rewrite the manifest with the current hash of every file that it lists."""
    manifest = json.loads((checkpoint / form.MANIFEST).read_text())
    manifest["files"] = {name: form.digest_file(checkpoint / name) for name in manifest["files"]}
    (checkpoint / form.MANIFEST).write_text(sealed(manifest))


def tensors(header, body=BODY, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def one(dtype="U8", shape=(16,), offsets=(0, 16)):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


# -- invalid manifests, values and tensors -----------------------------------------------------------------------------


def values(change):
    """Change train_state.json and update its hash."""

    def damage(checkpoint):
        content = json.loads((checkpoint / form.VALUES).read_text())
        change(content)
        (checkpoint / form.VALUES).write_text(json.dumps(content))
        sign(checkpoint)

    return damage


def raw(name, content):
    """Replace the bytes of a file and update its hash, unless the file is the manifest itself."""

    def damage(checkpoint):
        (checkpoint / name).write_bytes(content)
        if name != form.MANIFEST:
            sign(checkpoint)

    return damage


def listed(name):
    """Add a file name to the manifest."""

    def damage(checkpoint):
        manifest = json.loads((checkpoint / form.MANIFEST).read_text())
        manifest["files"][name] = "0" * 64
        (checkpoint / form.MANIFEST).write_text(sealed(manifest))

    return damage


def huge(name, size):
    def damage(checkpoint):
        with (checkpoint / name).open("r+b") as file:
            file.truncate(size)  # sparse: uses no disk space

    return damage


def instead(name, make):
    def damage(checkpoint):
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return damage


DAMAGED = {
    "a manifest of a gigabyte": (
        huge(form.MANIFEST, 2**30),
        "holds 1,073,741,824 bytes, more than the limit of 4,194,304",
    ),
    "values of 64 megabytes": (huge(form.VALUES, 2**26), "is not what was written"),
    "tensors beyond any memory": (huge(form.SHARED, 32 * psutil.virtual_memory().total), "bytes of memory"),
    "a manifest that is a pipe": (instead(form.MANIFEST, os.mkfifo), "is not a file"),
    "tensors that are a pipe": (instead(form.SHARED, os.mkfifo), "is missing"),
    "a manifest that is a directory": (instead(form.MANIFEST, os.mkdir), "is not a file"),
    "a manifest that is a link": (instead(form.MANIFEST, lambda path: path.symlink_to("/etc/hostname")), "is a link"),
    "tensors that are a link": (instead(form.SHARED, lambda path: path.symlink_to("/dev/zero")), "leads out"),
    "a manifest nested deep": (raw(form.MANIFEST, b"[" * 10**6), "nested too deep"),
    "a manifest with a key twice": (raw(form.MANIFEST, b'{"files": {}, "files": {}}'), "the key 'files' is duplicated"),
    "a manifest in another encoding": (raw(form.MANIFEST, b"\xff\xfe{\0}\0"), "cannot be read"),
    "a manifest that is a number": (raw(form.MANIFEST, b"1e999"), "does not list the files"),
    "a manifest of endless digits": (raw(form.MANIFEST, b"9" * 10**5), "is not json"),
    "a manifest that lists lists": (
        raw(form.MANIFEST, sealed({"format": form.FORMAT, "files": [["shared.safetensors"]], "checksum": ""}).encode()),
        "does not list",
    ),
    "a name that goes up": (listed("../../config.yaml"), "leads out of the checkpoint"),
    "a name from the root": (listed("/etc/passwd"), "leads out of the checkpoint"),
    "a name with a zero in it": (listed("a\0b"), "leads out of the checkpoint"),
    "a name of half a letter": (listed("\ud800"), "leads out of the checkpoint"),
    "a name of a megabyte": (listed("a" * 2**20), "leads out of the checkpoint"),
    "a hidden name": (listed(".ssh"), "leads out of the checkpoint"),
    "a file that is not there": (listed("more.safetensors"), "more.safetensors is missing"),
    "values that are a list": (raw(form.VALUES, b"[]"), "holds no clock"),
    "values nested deep": (raw(form.VALUES, b'{"clock":' * 10**5), "nested too deep"),
    "no clock": (values(lambda v: v.pop("clock")), "holds no clock"),
    "no lanes": (values(lambda v: v.pop("lanes")), "has no valid number of lanes"),
    "lanes in words": (values(lambda v: v.update(lanes="eight")), "has no valid number of lanes"),
    "lanes that are true": (values(lambda v: v.update(lanes=True)), "has no valid number of lanes"),
    "lanes beyond measure": (values(lambda v: v.update(lanes=10**30)), "has no valid number of lanes"),
    "processes that are half": (values(lambda v: v.update(processes=0.5)), "has no valid number of processes"),
    "a clock without samples": (values(lambda v: v["clock"].pop("samples")), "the clock's samples"),
    "samples that are infinite": (values(lambda v: v["clock"].update(samples=float("inf"))), "the clock's samples"),
    "samples that are no number": (values(lambda v: v["clock"].update(samples=float("nan"))), "the clock's samples"),
    "samples below zero": (values(lambda v: v["clock"].update(samples=-1)), "the clock's samples"),
    "a best score in words": (values(lambda v: v["clock"].update(best="high")), "the clock's best"),
    "metrics that are a list": (values(lambda v: v["clock"].update(metrics=[1])), "the clock's metrics"),
    "a sum without its count": (
        values(lambda v: v["clock"].update(metric_sums={"a": [1.0]})),
        "the clock's metric_sums",
    ),
    "a lane file too few": (values(lambda v: v.update(lanes=9)), "lists no file for lane 8"),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGED.values(), ids=DAMAGED)
def test_invalid_checkpoint_is_skipped_with_a_message(run, damage, sentence):
    damage(newest(run))
    with pytest.raises(ConfigError) as refused:
        find(run / CHECKPOINTS, 2 * ITERATION)
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 2000
    name, notes = find(run / CHECKPOINTS)
    assert name.samples == ITERATION
    assert sentence in notes[0]


def test_clock_that_replaces_a_method_is_refused(run):
    values(lambda v: v["clock"].update(crossed=1))(newest(run))
    with pytest.raises(ConfigError, match=r"the clock field 'crossed', which Lockstep .* does not know"):
        find(run / CHECKPOINTS)


SHARED = {
    "2^60 numbers": tensors(one("F32", (2**60,), (0, 16))),
    "a product beyond 64 bits": tensors(one("F32", (2**40, 2**40), (0, 16))),
    "no numbers in 2^63 rows": tensors(one("F32", (0, 2**63), (0, 0)), b""),
    "a negative shape": tensors(one("U8", (-16,))),
    "an unknown kind of number": tensors(one("F99")),
    "offsets beyond the file": tensors(one("U8", (2**40,), (0, 2**40))),
    "tensors that overlap": tensors(one() | {"b": one()["a"]}),
    "bytes that belong to no tensor": tensors({}),
    "a header longer than the file": tensors({}, length=10**6),
    "a header of 2^63 bytes": tensors({}, length=2**63),
    "a header nested deep": tensors(b"[" * 10**5),
    "a header that is a list": tensors(b"[]"),
    "seven bytes": b"\0" * 7,
    "nothing": b"",
    "a pickle": b"\x80\x04cos\nsystem\n(S'touch /tmp/lockstep-was-here'\ntR.",
}


@pytest.mark.parametrize("content", SHARED.values(), ids=SHARED)
def test_invalid_tensor_file_with_valid_hash_is_refused(run, content):
    raw(form.SHARED, content)(newest(run))
    for use in (lambda: load(run, 2 * ITERATION), lambda: train(load_recipe(run), resume=True)):
        with pytest.raises(ConfigError, match=r"shared\.safetensors cannot be read"):
            use()
    assert not os.path.exists("/tmp/lockstep-was-here")


def change(name, edit):
    """Change the tensors of a file and update its hash."""

    def damage(checkpoint):
        state = load_file(checkpoint / name)
        edit(state)
        save_file(state, checkpoint / name)
        sign(checkpoint)

    return damage


def board(name, value):
    return change(LANES, lambda state: state[f"lane-0003.task.{name}"].fill_(value))


UNFIT = {
    "no tensors": (change(form.SHARED, dict.clear), "does not match this configuration"),
    "a tensor too many": (change(form.SHARED, lambda s: s.update({"algorithm.x": torch.ones(1)})), "unexpected ['x']"),
    "a state of the task's": (change(form.SHARED, lambda s: s.update({"task.x": torch.ones(1)})), "unexpected ['x']"),
    "another kind of number": (
        change(form.SHARED, lambda s: s.update({k: v.double() for k, v in s.items()})),
        "float64",
    ),
    "another shape": (change(form.SHARED, lambda s: s.update({k: v[None] for k, v in s.items()})), "was saved as"),
    "a lane without tensors": (change(LANES, dict.clear), "does not match this configuration"),
    "a head outside the board": (board("front", 10**12), "not in a valid state"),
    "a snake longer than the board": (board("length", 10**9), "not in a valid state"),
    "a snake of no length": (board("length", 0), "not in a valid state"),
    "food beyond the memory": (board("food", -(2**60)), "not in a valid state"),
    "a heading that is none": (board("heading", 7), "not in a valid state"),
    "a body outside the board": (board("body", 2**30), "not in a valid state"),
    "a body on one cell": (board("body", 5), "not in a valid state"),
    "a picture full of snake": (board("planes", 1), "not in a valid state"),
    "more lanes than the config": (values(lambda v: v.update(lanes=4)), "was written with 4 lanes"),
}


@pytest.mark.parametrize(("damage", "sentence"), UNFIT.values(), ids=UNFIT)
def test_resume_from_undamaged_but_mismatched_checkpoint_is_refused(run, damage, sentence):
    damage(newest(run))
    with pytest.raises(ConfigError) as refused:
        train(load_recipe(run), resume=True)
    assert sentence in str(refused.value)


GYM = {
    "an action that is none": ({"actions": torch.tensor([7, 0])}, "are not in Discrete"),
    "another kind of action": ({"actions": torch.tensor([0.0, 1.0])}, "are not in Discrete"),
    "another shape of action": ({"actions": torch.zeros(2, 9, dtype=torch.int64)}, "are not in Discrete"),
    "a single number for actions": ({"actions": torch.tensor(0)}, "more than the"),
    "more actions than an episode has": ({"actions": torch.zeros(10**6, dtype=torch.int64)}, "more than the"),
    "fewer actions than steps": ({"actions": torch.tensor([0])}, "do not match"),
    "steps below zero": ({"steps": torch.tensor([-1])}, "do not match"),
    "actions below zero": ({"logged": torch.tensor([-2])}, "do not match"),
    "more actions than there is memory": ({"logged": torch.tensor([2**60])}, "do not match"),
    "an episode beyond count": ({"episode": torch.tensor([2**63 - 1])}, "do not match"),
}


@pytest.mark.parametrize(("changed", "sentence"), GYM.values(), ids=GYM)
def test_gym_load_lane_state_rejects_invalid_actions(changed, sentence):
    task = GymConfig(id="CartPole-v1", num_envs=1).build(Lanes(1, range(1), 0), torch.device("cpu"))
    task.reset()
    for action in (0, 1):
        task.step(torch.tensor([action]))
    state = task.lane_state(0)
    with pytest.raises(ValueError, match="CartPole-v1, lane 0: the saved") as refused:
        task.load_lane_state(0, state | changed)
    assert sentence in str(refused.value)
    task.load_lane_state(0, state)
    task.close()


# -- swapped files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [form.SHARED, form.VALUES, LANES])
def test_file_swapped_between_checkpoints_is_detected(run, name):
    one, other = (run / CHECKPOINTS / str(each) for each in lineage(run / CHECKPOINTS))
    (one / name).rename(one.parent / "aside")
    (other / name).rename(one / name)
    (one.parent / "aside").rename(other / name)
    with pytest.raises(ConfigError, match="No undamaged checkpoint is left") as refused:
        find(run / CHECKPOINTS)
    assert str(refused.value).count(f"{name} is not what was written") == 2


# -- files next to checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 50, b"../../x", b"000000000256-g0009", b"9" * 4000],
    ids=["none", "bytes", "up", "g9", "9"],
)
def test_best_checkpoint_invalid_pointer_returns_none(run, content):
    (run / CHECKPOINTS / "best").write_bytes(content)
    assert best_checkpoint(run / CHECKPOINTS) is None


def test_lineage_ignores_invalid_generation_files(run):
    (run / CHECKPOINTS / "attempt-999999999.json").write_text("{")
    for name in ("attempt-\u00b2.json", "attempt-x.json", f"attempt-{'9' * 200}.json"):
        (run / CHECKPOINTS / name).write_text('{"parent": null}')
    (run / CHECKPOINTS / "\u0661\u0662-g\u0661").mkdir()
    assert checkpoints_of(run) == [ITERATION, 2 * ITERATION]


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "tensorboard", ".metrics.jsonl.partial"])
def test_resume_refuses_a_run_with_symlinked_paths(run, tmp_path, name):
    place, target = run / name, tmp_path / "mine"
    if place.exists():
        place.rename(target)
    else:
        target.write_text("mine")
    place.symlink_to(target)
    with pytest.raises(ConfigError, match="is a link, but a run must only write to its own directory"):
        train(load_recipe(run), resume=True)


def test_symlinked_checkpoint_is_ignored(run, tmp_path):
    newest(run).rename(tmp_path / "elsewhere")
    (run / CHECKPOINTS / f"{2 * ITERATION:012d}-g0001").symlink_to(tmp_path / "elsewhere")
    assert checkpoints_of(run) == [ITERATION]


@pytest.mark.parametrize(
    "line",
    [b"[1]", b'"a"', b"\xff\xfe", b'{"samples": "many"}', b'{"samples": [1]}', b"[" * 10**5, b"null", b"x" * 10**6],
)
def test_invalid_lines_of_a_log_are_skipped(run, line, capsys):
    path = run / "metrics.jsonl"
    before = last_values(path)
    with path.open("ab") as file:
        file.write(line + b"\n")
    assert last_values(path) == before
    truncate_after(path, ITERATION)
    assert last_values(path)["samples"] == ITERATION
    assert main(["ls", str(run.parent)]) == 0
    assert "snake-ppo" in capsys.readouterr().out


# -- memory ------------------------------------------------------------------------------------------------------------

HEADER_BOUND = 512
"""Memory limit in MiB for tensor file headers."""


def memory_growth(directory):
    """In a separate process: return the peak memory growth in MiB after reading each oversized file of tensors.

    `test_memory_bounds.py` has the other files.
    """
    path = Path(directory)
    entries = ",".join(f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(290_000))
    (path / form.SHARED).write_bytes(tensors(f"{{{entries}}}".encode(), b""))
    assert HEADER_BYTES * 0.9 < (path / form.SHARED).stat().st_size < HEADER_BYTES
    (path / "wide.safetensors").write_bytes(tensors(one("U8", (2**33,), (0, 2**33)), b""))
    os.truncate(path / "wide.safetensors", (path / "wide.safetensors").stat().st_size + 2**33)  # sparse
    readers = [
        lambda: form.read_shared(path),
        lambda: form.read_tensor_file(path / "wide.safetensors", None),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = []
    for read in readers:
        with contextlib.suppress(ConfigError, form.CorruptCheckpointError):
            read()
        taken.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    return taken


def test_reading_oversized_tensor_files_stays_within_the_memory_bound(tmp_path):
    (taken,) = together(memory_growth, 1, str(tmp_path))
    assert max(taken) < HEADER_BOUND, taken


def test_refused_checkpoint_leaves_the_run_unchanged(run):
    before = hash_of(run)
    board("front", 10**12)(newest(run))
    with pytest.raises(ConfigError):
        train(load_recipe(run), resume=True)
    shutil.rmtree(newest(run))
    train(load_recipe(run), resume=True)
    assert hash_of(run) == before
