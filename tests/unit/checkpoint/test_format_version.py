"""Format versions: older and newer files are rejected, and no file is modified."""

import hashlib
import json

import pytest

from helpers.manifests import sealed
from helpers.tiny_recipes import ITERATION, tiny
from lockstep import __version__
from lockstep.checkpoint import format as form
from lockstep.checkpoint.format_version import FORMAT, UnknownFormat, config_without_version
from lockstep.checkpoint.lineage import find, lineage
from lockstep.cli import main
from lockstep.config import ConfigError, read_yaml
from lockstep.inference import load, load_recipe
from lockstep.training_loop import train

NEWER = FORMAT + 1


@pytest.fixture
def run(tmp_path):
    return train(tiny(tmp_path, total_samples=2 * ITERATION)).path


def newest(run):
    return run / "checkpoints" / str(lineage(run / "checkpoints")[0])


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(sealed(values))


def edit_state(checkpoint, change):
    """Change train_state.json and update its hash."""
    edit_json(checkpoint / form.VALUES, change)
    digest = hashlib.sha256((checkpoint / form.VALUES).read_bytes()).hexdigest()
    edit_json(checkpoint / form.MANIFEST, lambda manifest: manifest["files"].update({form.VALUES: digest}))


def make_version(run, version):
    """Write an older version everywhere; version 1 had no `format` field."""
    for checkpoint in (path.parent for path in run.rglob(form.MANIFEST)):
        edit_state(checkpoint, lambda values: values.update(format=version))
        edit_json(checkpoint / form.MANIFEST, lambda manifest: manifest.update(format=version))
    config = run / "config.yaml"
    line = f"format: {version}\n" if version > 1 else ""
    config.write_text(config.read_text().replace(f"format: {FORMAT}\n", line))


def test_format_version_is_written_to_config_manifest_and_state(run):
    assert read_yaml(run / "config.yaml")["format"] == FORMAT
    for name in (form.MANIFEST, form.VALUES):
        assert json.loads((newest(run) / name).read_text())["format"] == FORMAT


@pytest.mark.parametrize("version", [1, 2])
def test_run_of_older_format_is_rejected_without_changes(run, version, capsys):
    make_version(run, version)
    before = contents(run)
    commands = (["resume", str(run)], ["eval", str(run)], ["play", str(run)], ["export", str(run)])
    for words in (*commands, ["train", "snake-ppo", "--smoke", "--init-from", str(run)]):
        assert main(words) == 2, words
        told = capsys.readouterr().err
        assert f"has format {version}, and Lockstep {__version__} reads formats from {FORMAT} on" in told
        assert "Nothing was changed" in told
    assert main(["verify-files", str(run)]) != 0
    assert f"has format {version}" in "".join(capsys.readouterr())
    assert main(["ls", str(run.parent)]) == 0
    assert f"format {version}" in capsys.readouterr().out
    assert contents(run) == before


def test_newer_config_is_rejected_with_both_versions_without_changes(run, capsys):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"format: {FORMAT}", "format: 99"))
    before = contents(run)
    for words in (["resume", str(run)], ["eval", str(run)], ["export", str(run)]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f"config.yaml has format 99, and Lockstep {__version__} knows formats up to {FORMAT}" in told
        assert "Upgrade" in told
    assert contents(run) == before


def newer_manifest(checkpoint):
    edit_json(checkpoint / form.MANIFEST, lambda manifest: manifest.update(format=NEWER, files={"other": "layout"}))


def newer_state(checkpoint):
    edit_state(checkpoint, lambda values: values.update(format=NEWER, clock=[1]))


def unknown_clock_field(checkpoint):
    edit_state(checkpoint, lambda values: values["clock"].update(lessons=3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (newer_manifest, f"manifest.json has format {NEWER}, and Lockstep {__version__} knows formats up to {FORMAT}"),
        (newer_state, f"train_state.json has format {NEWER}, and Lockstep {__version__} knows formats up to {FORMAT}"),
        (
            unknown_clock_field,
            f"train_state.json has the clock field 'lessons', which Lockstep {__version__} does not know",
        ),
    ],
)
def test_newer_checkpoint_is_rejected_and_not_reported_as_damaged(run, change, words):
    change(newest(run))
    before = contents(run / "checkpoints")
    for use in (lambda: find(run / "checkpoints"), lambda: load(run), lambda: train(load_recipe(run), resume=True)):
        with pytest.raises(ConfigError) as refused:
            use()
        assert words in str(refused.value)
        assert "damaged" not in str(refused.value)
    assert contents(run / "checkpoints") == before


@pytest.mark.parametrize("version", [0, -1, "2", 1.5, True, None, [2]])
def test_invalid_format_version_is_rejected(run, version):
    edit_json(newest(run) / form.MANIFEST, lambda manifest: manifest.update(format=version))
    with pytest.raises(form.CorruptCheckpointError, match="is not a version"):
        form.read_manifest(newest(run))
    with pytest.raises(ConfigError, match="is not a version"):
        config_without_version({"format": version}, "config.yaml")


def test_missing_clock_field_of_format_3_is_corrupt(run):
    edit_state(newest(run), lambda values: values["clock"].pop("samples"))
    with pytest.raises(form.CorruptCheckpointError, match="clock's samples"):
        form.read_values(newest(run))


def test_milestone_of_newer_format_is_kept(run):
    newer_manifest(newest(run))
    assert form.is_permanent(newest(run))
    with pytest.raises(UnknownFormat):
        form.read_manifest(newest(run))
