"""Damaged replay: repaired from parity, ignored if only weights are loaded, dropped on request. Read errors differ."""

import errno
import io
import json
import math
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from helpers.manifests import sealed
from helpers.multiprocess import together
from helpers.recorder import record
from helpers.tiny_recipes import hash_of
from lockstep.algorithms.ddpg.agent import DDPG
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find, lineage, list_checkpoints
from lockstep.checkpoint.parity import BLOCK
from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.inference import load_algorithm, load_recipe
from lockstep.io.jsonl import CHECKPOINTS
from lockstep.registry import find_recipe
from lockstep.training_loop import train

STEP = 64
"""Samples per iteration of the small DDPG run."""


def small_ddpg(directory, **settings):
    """Return a DDPG recipe on Pendulum that learns from the second iteration."""
    recipe = apply_overrides(
        find_recipe("gym-ddpg")(),
        {
            "task": {"num_envs": 8},
            "algo": {"rollout_steps": 8, "batch_size": 16, "learning_starts": 2 * STEP, "buffer_size": 4096},
            "run": {
                "total_samples": 4 * STEP,
                "save_every": STEP,
                "log_every": STEP,
                "eval_every": None,
                "keep_last": 100,
            },
            "run.record_video": False,
            "run.device": "cpu",
        },
    )
    return apply_overrides(recipe, {"run": {"runs_dir": str(directory), "name": "run", **settings}})


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return train(small_ddpg(tmp_path_factory.mktemp("original"))).path


@pytest.fixture
def run(original, tmp_path):
    """Copy the run and keep its hard links."""
    target = tmp_path / "run"
    done: dict[int, Path] = {}
    for path in sorted(original.rglob("*")):
        place = target / path.relative_to(original)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        elif path.stat().st_ino in done:
            os.link(done[path.stat().st_ino], place)
        else:
            shutil.copy2(path, place)
            done[path.stat().st_ino] = place
    return target


def newest(run):
    return run / CHECKPOINTS / str(lineage(run / CHECKPOINTS)[0])


def oldest_segment(run):
    """Return a segment that every checkpoint links to."""
    path = sorted(newest(run).glob("replay-*.safetensors"))[0]
    assert path.stat().st_nlink == len(list_checkpoints(run / CHECKPOINTS))
    return path


def flip(path, *places):
    """Flip bytes of the file in place, which changes all its hard links."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))


def ruin(path):
    """Damage more blocks than parity can repair."""
    flip(path, *range(8, path.stat().st_size, BLOCK // 2))


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------------------------- repairing


def test_flipped_byte_in_a_shared_segment_is_repaired_on_resume(run, caplog):
    before = contents(run / CHECKPOINTS)
    segment = oldest_segment(run)
    flip(segment, segment.stat().st_size // 2)
    assert contents(run / CHECKPOINTS) != before
    name, notes = find(run / CHECKPOINTS)
    assert (name.samples, notes) == (4 * STEP, [])
    assert f"Repaired 1 damaged blocks of {segment} from its parity file" in caplog.text
    assert contents(run / CHECKPOINTS) == before  # in every checkpoint
    train(apply_overrides(load_recipe(run), {"run.total_samples": 5 * STEP}), resume=True)
    assert find(run / CHECKPOINTS)[0].samples == 5 * STEP


def test_damaged_segment_without_parity_is_not_repaired(tmp_path):
    path = train(small_ddpg(tmp_path, replay_parity=False)).path
    assert not list(path.rglob("*.parity"))
    flip(oldest_segment(path), 100)
    with pytest.raises(ConfigError, match="No undamaged checkpoint is left"):
        find(path / CHECKPOINTS)


def test_parity_setting_does_not_change_the_run_hash(tmp_path):
    hashes = {hash_of(record(tmp_path, str(on), replay_parity=on)) for on in (True, False)}
    assert len(hashes) == 1


def test_parity_files_are_linked_and_deleted_with_their_segments(tmp_path):
    path = record(tmp_path, keep_last=2)
    for checkpoint in (path / CHECKPOINTS / str(name) for name in list_checkpoints(path / CHECKPOINTS)):
        segments = {file.stem for file in checkpoint.glob("replay-*.safetensors")}
        assert segments == {file.stem for file in checkpoint.glob("replay-*.parity")}
        assert {f"{stem}.parity" for stem in segments} <= form.read_manifest(checkpoint)["files"].keys()


def test_verify_files_repairs_and_exits_with_0(run, capsys):
    before = contents(run / CHECKPOINTS)
    segment = oldest_segment(run)
    flip(segment, 100, 101)
    flip(sorted(newest(run).glob("*.parity"))[-1], 5)
    assert main(["verify-files", str(run)]) == 0
    told = capsys.readouterr().out
    assert f"{segment.name}: 1 blocks, from its parity file" in told
    assert "computed again from its segment" in told
    assert "2 repaired" in told
    assert contents(run / CHECKPOINTS) == before
    assert main(["verify-files", str(run)]) == 0
    assert "repaired" not in capsys.readouterr().out


def test_resume_succeeds_with_missing_or_damaged_parity(run):
    flip(sorted(newest(run).glob("*.parity"))[0], 5)
    sorted(newest(run).glob("*.parity"))[1].unlink()
    assert find(run / CHECKPOINTS)[0].samples == 4 * STEP
    train(apply_overrides(load_recipe(run), {"run.total_samples": 6 * STEP}), resume=True)
    assert find(run / CHECKPOINTS)[0].samples == 6 * STEP


def test_verify_files_lists_unrepairable_damage_and_exits_with_1(run, capsys):
    ruin(oldest_segment(run))
    flip(newest(run) / form.SHARED, 100)
    before = contents(run / CHECKPOINTS)
    assert main(["verify-files", str(run)]) == 1
    told = capsys.readouterr().out
    assert f"damaged: {newest(run) / form.SHARED}" in told
    assert "2 damaged" in told  # the segment once, though every checkpoint has it
    assert "resume --without-replay" in told
    assert contents(run / CHECKPOINTS) == before


def test_verify_files_rejects_a_directory_without_a_run(tmp_path):
    assert main(["verify-files", str(tmp_path)]) == 2


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_load_and_export_although_replay_and_lanes_are_damaged(run, tmp_path, capsys):
    wanted = load_algorithm(run, load_recipe(run)).shared_state()
    ruin(oldest_segment(run))
    for path in run.rglob("lanes-*.safetensors"):
        ruin(path)
    found = load_algorithm(run, load_recipe(run)).shared_state()
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    assert main(["export", str(run), "--out", str(tmp_path / "weights.safetensors")]) == 0
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    recipe = apply_overrides(small_ddpg(tmp_path, total_samples=STEP), {"run.name": "second"})
    assert train(recipe, init_from=str(run)).clock.samples == STEP
    with pytest.raises(ConfigError, match="No undamaged checkpoint is left"):
        train(load_recipe(run), resume=True)


def test_damaged_weights_are_refused(run):
    for path in run.rglob(form.SHARED):
        flip(path, path.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"shared\.safetensors is not what was written"):
        load_algorithm(run, load_recipe(run))


def test_resume_without_replay_needs_the_flag_and_logs_a_warning(run, capsys):
    ruin(oldest_segment(run))
    before, last = contents(run / CHECKPOINTS), newest(run).name
    assert main(["resume", str(run), "--total-samples", str(6 * STEP)]) == 2
    assert "No undamaged checkpoint is left" in capsys.readouterr().err
    assert contents(run / CHECKPOINTS) == before
    assert main(["resume", str(run), "--total-samples", str(6 * STEP), "--without-replay"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"WITHOUT REPLAY: 32 rows of replay of checkpoint {last} were dropped" in told
    assert find(run / CHECKPOINTS)[0].samples == 6 * STEP
    assert form.read_values(newest(run))["rows"] == [0, 16]
    assert main(["resume", str(run), "--total-samples", str(7 * STEP)]) == 0  # with the replay it has now


def test_resume_without_replay_keeps_everything_else(run):
    saved = load_algorithm(run, load_recipe(run)).shared_state()
    seen = {}

    class Stop(Exception): ...

    def look(self, clock):
        seen.update({name: tensor.clone() for name, tensor in self.shared_state().items()})
        seen["rows"], seen["samples"] = self.replay.count, clock.samples
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDPG, "collect", look)
        with pytest.raises(Stop):
            train(apply_overrides(load_recipe(run), {"run.total_samples": 5 * STEP}), resume=True, without_replay=True)
    assert (seen.pop("rows"), seen.pop("samples")) == (0, 4 * STEP)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in seen.items())


# --------------------------------------------------------------------------------------------------------- read errors


def refuse(monkeypatch, name, code):
    """Make opening files with this name raise an OSError."""

    def refusing(real):
        def failing(file, *arguments, **settings):
            if str(file).endswith(name):
                raise OSError(code, os.strerror(code), str(file))
            return real(file, *arguments, **settings)

        return failing

    monkeypatch.setattr(io, "open", refusing(io.open))
    monkeypatch.setattr(os, "open", refusing(os.open))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize(
    "name", [form.MANIFEST, form.VALUES, form.SHARED, "lanes-0000-0007.safetensors", "attempt-0001.json"]
)
def test_read_error_is_not_reported_as_damage_and_deletes_nothing(run, monkeypatch, name, code):
    before = contents(run / CHECKPOINTS)
    with monkeypatch.context() as patch:
        refuse(patch, name, code)
        with pytest.raises(ConfigError) as refused:
            train(load_recipe(run), resume=True)
    assert os.strerror(code) in str(refused.value)
    assert "damaged" not in str(refused.value)
    assert contents(run / CHECKPOINTS) == before


def test_read_error_of_the_best_pointer_deletes_nothing(tmp_path, monkeypatch, caplog):
    path = train(small_ddpg(tmp_path, total_samples=2 * STEP, keep_last=1)).path
    (path / CHECKPOINTS / "best").write_text(newest(path).name)
    before = list_checkpoints(path / CHECKPOINTS)
    refuse(monkeypatch, "best", errno.EIO)
    train(apply_overrides(load_recipe(path), {"run.total_samples": 3 * STEP}), resume=True)
    assert "Input/output error" in caplog.text
    assert set(before) <= set(list_checkpoints(path / CHECKPOINTS))


def test_unreadable_milestone_is_kept(run, monkeypatch):
    refuse(monkeypatch, form.MANIFEST, errno.EACCES)
    assert form.is_permanent(newest(run))


def test_verify_files_tells_read_errors_from_damage(run, monkeypatch, capsys):
    refuse(monkeypatch, form.SHARED, errno.EACCES)
    assert main(["verify-files", str(run)]) == 1
    told = capsys.readouterr().out
    assert f"unreadable: {newest(run) / form.SHARED}" in told
    assert "Permission denied" in told
    assert "damaged" not in told


# -------------------------------------------------------------------------------------------------------------- bounds


def wide(name, shape, dtype, rows):
    """Make the rows of one tensor of one lane far too long."""
    return ([rows, 2**23], "F64") if name == "lane-0000.algorithm.replay.obs" else ([rows, *shape[1:]], dtype)


def long(name, shape, dtype, rows):
    """Keep the row shape but use far too many rows."""
    return [rows, *shape[1:]], dtype


def plant_sparse(run, form_of, rows):
    """Replace the newest checkpoint's segments with one sparse segment of `rows` rows, with valid hashes."""
    checkpoint = newest(run)
    manifest = json.loads((checkpoint / form.MANIFEST).read_text())
    example = sorted(checkpoint.glob("replay-*.safetensors"))[0]
    with example.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    stop, planted = 0, {}
    for name, entry in header.items():
        shape, dtype = form_of(name, entry["shape"], entry["dtype"], rows)
        size = math.prod(shape) * {"F64": 8, "I64": 8, "F32": 4, "BOOL": 1, "U8": 1}[dtype]
        planted[name] = {"dtype": dtype, "shape": shape, "data_offsets": [stop, stop + size]}
        stop += size
    for path in checkpoint.glob("replay-*"):
        del manifest["files"][path.name]
        path.unlink()
    text = json.dumps(planted).encode()
    path = checkpoint / form.rows_file(range(1), 0, rows)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, path.stat().st_size + stop)
    values = json.loads((checkpoint / form.VALUES).read_text()) | {"rows": [0, rows]}
    manifest["files"][form.VALUES] = form.write_json(checkpoint / form.VALUES, values)
    manifest["files"][path.name] = form.digest_file(path)
    (checkpoint / form.MANIFEST).write_text(sealed(manifest))
    return path.stat().st_size


def load_and_measure(directory):
    """In a separate process: return the error message and how many bytes the process grew."""
    recipe = load_recipe(Path(directory))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        train(recipe, resume=True)
    except ConfigError as refused:
        return str(refused), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return "", 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("form_of", "rows", "words"),
    [(wide, 4, "was saved as torch.float64 (8388608,)"), (long, 2**20, "1,048,576 rows were saved, and 512 fit")],
)
def test_sparse_segment_is_refused_before_it_allocates_memory(tmp_path, form_of, rows, words):
    train(small_ddpg(tmp_path, total_samples=2 * STEP, lanes=1))
    size = plant_sparse(tmp_path / "run", form_of, rows)
    assert size > 2**28
    (ended,) = together(load_and_measure, 1, str(tmp_path / "run"))
    assert words in ended[0]
    assert ended[1] < 128 * 2**20, f"{ended[1]:,} bytes for a file of {size:,}"
