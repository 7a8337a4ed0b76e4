"""Format versions: older files are migrated or rejected, newer ones rejected, and no file is modified."""

import hashlib
import json
from dataclasses import asdict, dataclass, field

import pytest

from helpers.manifests import sealed
from helpers.tiny_recipes import ITERATION, tiny
from lockstep import __version__
from lockstep.checkpoint import format as form
from lockstep.checkpoint import migrations, validation
from lockstep.checkpoint.lineage import find, lineage
from lockstep.checkpoint.migrations import FORMAT, UnknownFormat, migrate
from lockstep.cli import main
from lockstep.clock import TrainState
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


def test_migration_tables_cover_every_older_version():
    for table in (migrations.MANIFEST, migrations.STATE, migrations.CONFIG):
        assert sorted(table) == list(range(migrations.OLDEST, FORMAT))


def test_migrate_applies_every_step_in_order(monkeypatch):
    monkeypatch.setattr(migrations, "FORMAT", 4)
    monkeypatch.setattr(migrations, "OLDEST", 1)
    table = {n: lambda values, n=n: values | {"steps": [*values.get("steps", []), n]} for n in (1, 2, 3)}
    given = {"format": 2, "kept": True}
    assert migrate(table, given, "a file") == {"kept": True, "steps": [2, 3]}
    assert migrate(table, {}, "a file") == {"steps": [1, 2, 3]}
    assert migrate(table, {"format": 4}, "a file") == {}
    assert given == {"format": 2, "kept": True}


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
        assert f"has format {version}, and Lockstep {__version__} reads formats from {migrations.OLDEST} on" in told
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
        migrations.migrate_config({"format": version}, "config.yaml")


def test_missing_clock_field_of_later_version_gets_default(run, monkeypatch):
    @dataclass
    class LaterClock(TrainState):
        lessons: dict[str, float] = field(default_factory=lambda: {"first": 1.0})

    monkeypatch.setattr(validation, "TrainState", LaterClock)
    assert form.verify(newest(run))
    assert form.read_values(newest(run))["clock"]["lessons"] == {"first": 1.0}
    edit_state(newest(run), lambda values: values["clock"].update(lessons={"first": 2.0}))
    assert form.read_values(newest(run))["clock"]["lessons"] == {"first": 2.0}


def test_missing_clock_field_of_format_3_is_corrupt(run):
    assert asdict(TrainState(total_samples=1)).keys() >= migrations.CLOCK_3
    edit_state(newest(run), lambda values: values["clock"].pop("samples"))
    with pytest.raises(form.CorruptCheckpointError, match="clock's samples"):
        form.read_values(newest(run))


def test_milestone_of_newer_format_is_kept(run):
    newer_manifest(newest(run))
    assert form.is_permanent(newest(run))
    with pytest.raises(UnknownFormat):
        form.read_manifest(newest(run))
