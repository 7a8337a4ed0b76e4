"""A resume skips damaged checkpoints, uses the previous one, and logs which file is damaged."""

import json
import shutil

import pytest
from run_helpers import SAMPLES, errors, run, run_killed

from helpers.manifests import sealed
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint.lineage import lineage

pytestmark = pytest.mark.distributed


def truncate(checkpoint):
    path = checkpoint / "shared.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def flip_a_bit(checkpoint):
    path = next(checkpoint.glob("lanes-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def lose_the_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()
    return "manifest.json"


def lose_a_lane_file(checkpoint):
    path = next(checkpoint.glob("lanes-*.safetensors"))
    path.unlink()
    return path.name


def spoil_the_values(checkpoint):
    (checkpoint / "train_state.json").write_text("{")
    return "train_state.json"


def lead_out_of_the_directory(checkpoint):
    """Write a manifest with valid hashes that lists a file outside the checkpoint."""
    outside = checkpoint.parent / "outside.safetensors"
    shutil.copy(checkpoint / "shared.safetensors", outside)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["../outside.safetensors"] = manifest["files"]["shared.safetensors"]
    (checkpoint / "manifest.json").write_text(sealed(manifest))
    return "leads out of the checkpoint"


def change_the_recorded_machine(checkpoint):
    """Change a byte of the manifest that no file checksum covers."""
    path = checkpoint / "manifest.json"
    text = path.read_bytes()
    place = text.index(b'"numpy": "') + len(b'"numpy": "')
    path.write_bytes(text[:place] + b"/" + text[place + 1 :])
    return "manifest.json"


DAMAGES = [
    change_the_recorded_machine,
    truncate,
    flip_a_bit,
    lose_the_manifest,
    lose_a_lane_file,
    spoil_the_values,
    lead_out_of_the_directory,
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of two processes killed in its last iteration, and the hash of the uninterrupted run."""
    directory = tmp_path_factory.mktemp("stopped")
    assert not errors(run(directory, "whole", 1))
    assert "SIGKILL" in run_killed(directory, "run", 2, kill="1:learn:4")
    return directory / "run", hash_of(directory / "whole")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_resume_with_damaged_checkpoint_uses_the_previous_one(tmp_path, stopped, damage):
    original, wanted = stopped
    shutil.copytree(original, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    newest, before = lineage(checkpoints)[:2]
    assert newest.samples == 3 * SAMPLES
    named = damage(checkpoints / str(newest))
    ended = run(tmp_path, "run", 3, resume=True)
    assert not errors(ended)
    told = " ".join(ended[0].output.split())
    assert f"Checkpoint {newest} is damaged" in told
    assert named in told
    assert f'"parent": "{before}"' in (checkpoints / "attempt-0002.json").read_text()
    assert hash_of(tmp_path / "run") == wanted


def test_resume_without_undamaged_checkpoint_fails_on_every_process(tmp_path, stopped):
    shutil.copytree(stopped[0], tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in lineage(checkpoints):
        truncate(checkpoints / str(name))
    for outcome in run(tmp_path, "run", 2, resume=True):
        assert outcome.error.startswith("ConfigError: Checkpoint")
        assert "No undamaged checkpoint is left" in outcome.error
