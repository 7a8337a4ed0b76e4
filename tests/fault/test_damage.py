"""A damaged checkpoint is never used: the one before it is, and the user is told which file was wrong."""

import json
import shutil

import pytest
from runs import SAMPLES, errors, run, run_killed

from lockstep.checkpoint.lineage import lineage
from manifests import sealed
from tiny import hash_of

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
    """A manifest that is right about every hash, and names a file outside."""
    outside = checkpoint.parent / "outside.safetensors"
    shutil.copy(checkpoint / "shared.safetensors", outside)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["../outside.safetensors"] = manifest["files"]["shared.safetensors"]
    (checkpoint / "manifest.json").write_text(sealed(manifest))
    return "leads out of the checkpoint"


def change_the_recorded_machine(checkpoint):
    """A byte of the manifest, which no checksum of a file covers."""
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
    """A run of two processes that was killed in its last iteration, and what it would have come to."""
    directory = tmp_path_factory.mktemp("stopped")
    assert not errors(run(directory, "whole", 1))
    assert "SIGKILL" in run_killed(directory, "run", 2, kill="1:learn:4")
    return directory / "run", hash_of(directory / "whole")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_resume_falls_back_to_the_checkpoint_before_and_says_so(tmp_path, stopped, damage):
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


def test_with_no_whole_checkpoint_left_the_run_refuses_on_every_process(tmp_path, stopped):
    shutil.copytree(stopped[0], tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in lineage(checkpoints):
        truncate(checkpoints / str(name))
    for outcome in run(tmp_path, "run", 2, resume=True):
        assert outcome.error.startswith("ConfigError: Checkpoint")
        assert "No whole checkpoint is left" in outcome.error
