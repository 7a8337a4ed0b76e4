"""`lockstep fork` and `lockstep ls --tree`."""

import json
import shutil

import pytest

from helpers.run_fixtures import write_run
from helpers.tiny_recipes import ITERATION, checkpoints_of, hash_of, tiny
from lockstep.cli import main
from lockstep.cli.fork import CHANGEABLE_IN_FORK, fork_settings
from lockstep.cli.run_tree import MAX_DEPTH, arrange
from lockstep.config import RunConfig
from lockstep.fork_record import ForkRecord, run_id
from lockstep.inference import load_recipe
from lockstep.io.jsonl import EXPERIMENT
from lockstep.training_loop import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A directory with a run of four iterations."""
    return train(tiny(tmp_path_factory.mktemp("runs"), "base", total_samples=4 * ITERATION)).path.parent


@pytest.fixture
def base(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return shutil.copytree(runs / "base", tmp_path / "base")


def text(captured):
    return " ".join((captured.out + captured.err).split())


def test_fork_trains_with_changes_and_tree_shows_them(base, capsys):
    source = f"{base}@{2 * ITERATION}"
    assert main(["fork", source, "lr=1e-4", "--run.name", "fork", "--total-samples", str(3 * ITERATION)]) == 0
    assert f"Forked {base} at 256 samples: {base.parent / 'fork'}" in text(capsys.readouterr())
    assert checkpoints_of(base.parent / "fork") == [2 * ITERATION, 3 * ITERATION]
    recipe = load_recipe(base.parent / "fork")
    assert (recipe.algo.learning_rate, recipe.run.total_samples) == (1e-4, 3 * ITERATION)
    assert hash_of(base.parent / "fork") != hash_of(base, 3 * ITERATION)
    assert main(["ls", str(base.parent), "--tree"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rate = load_recipe(base).algo.learning_rate
    (name,) = [line for line in lines if "fork " in line and "finished" in line]
    assert name.startswith("    fork")
    shown = f"fork of base at 256 samples: algo.learning_rate {rate} -> 0.0001, run.total_samples 512 -> 384"
    assert shown in " ".join(" ".join(lines).split())


def test_fork_of_seed_in_experiment_is_created_next_to_experiment(tmp_path):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / EXPERIMENT).write_text("{}")
    recipe = fork_settings(tiny(tmp_path / "exp", "seed-0"), {}, tmp_path / "exp" / "seed-0")
    assert recipe.run.runs_dir == str(tmp_path)


def test_fork_create_only_is_trained_by_resume(base, capsys):
    source = f"{base}@{2 * ITERATION}"
    assert main(["fork", source, "run.name=fork", "--create-only"]) == 0
    assert f"train lockstep resume {base.parent / 'fork'}" in text(capsys.readouterr())
    assert checkpoints_of(base.parent / "fork") == [2 * ITERATION]
    assert main(["resume", str(base.parent / "fork")]) == 0
    assert hash_of(base.parent / "fork") == hash_of(base)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["algo.encoder.hidden_sizes=8,16"], "the checkpoint depends on it"),
        (["--task.size", "5"], "the checkpoint depends on it"),
        (["run.seed=3"], "the saved environments and the order of data depend on it"),
        (["run.lanes=4"], "the saved state is partitioned into lanes"),
        (["algo.log_std_init=1"], "only at the start of a run"),
    ],
)
def test_refused_setting_names_reason_and_command(base, capsys, flags, reason):
    assert main(["fork", f"{base}@256", *flags]) == 2
    message = text(capsys.readouterr())
    assert "It cannot be changed when a run is forked" in message
    assert reason in message
    assert f"lockstep train snake-ppo --init-from {base}@256 --" in message
    assert [path.name for path in base.parent.iterdir()] == ["base"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["@5"], "There are: 128, 256, 384, 512"),
        (["@x"], "Give RUN@SAMPLES with a number of samples"),
        (["@256", "algo.batch_size=100"], "batch_size is 100"),
        (["@256", "-n", "9"], "9 processes cannot host 8 lanes"),
        (["@256", "--num-minibatches", "4"], "--num-minibatches is not known to fork"),
        (["@256", "--run.allow-other-machine", "true", "--create-only"], "applies to one start"),
        (["@256", "run.name=base"], "already contains a run"),
    ],
)
def test_invalid_fork_creates_nothing(base, capsys, arguments, message):
    source, *rest = arguments
    assert main(["fork", f"{base}{source}", *rest]) == 2
    assert message in text(capsys.readouterr())
    assert [path.name for path in base.parent.iterdir()] == ["base"]


def test_fork_under_torchrun_is_refused(base, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["fork", f"{base}@256"]) == 2
    assert "--create-only" in text(capsys.readouterr())


def test_changeable_settings_of_fork_exist():
    assert {*CHANGEABLE_IN_FORK} <= RunConfig.__dataclass_fields__.keys()


# -------------------------------------------------------------------------------------------------------- ls --tree


def listed(directory, name, parent=None, began=1.0, **claim):
    path = write_run(directory / name, claims=[{"parent": None, "host": "a", "pid": name, "began": began, **claim}])
    if parent is not None:
        record = ForkRecord(str(parent), run_id(parent), 256, "a" * 64, {})
        (path / "fork.json").write_text(record.to_json())
    return path


def tree(*paths):
    return [(row.path.name, row.depth) for row in arrange(paths)]


def test_tree_lists_forks_below_their_parents(tmp_path):
    base = listed(tmp_path, "z-base")
    first = listed(tmp_path, "a-first", base)
    second = listed(tmp_path, "b-second", base)
    third = listed(tmp_path, "c-third", first)
    assert tree(first, second, third, base) == [("z-base", 0), ("a-first", 1), ("c-third", 2), ("b-second", 1)]


def test_tree_says_that_parent_was_deleted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    base = listed(tmp_path, "base")
    listed(tmp_path, "fork", base)
    shutil.rmtree(base)
    assert main(["ls", str(tmp_path), "--tree"]) == 0
    assert f"fork of base at 256 samples ({base} was deleted or moved)" in text(capsys.readouterr())


def test_tree_of_invalid_and_cyclic_records_lists_every_run_once(tmp_path):
    one, two = listed(tmp_path, "one"), listed(tmp_path, "two")
    for path, other in ((one, two), (two, one)):
        (path / "fork.json").write_text(ForkRecord(str(other), run_id(other), 1, "a" * 64, {}).to_json())
    invalid = listed(tmp_path, "invalid")
    (invalid / "fork.json").write_text(json.dumps({"format": 3}))
    assert sorted(tree(one, two, invalid)) == [("invalid", 0), ("one", 0), ("two", 1)]
    assert "fork of an unknown run" in arrange([invalid])[0].fork


def test_tree_of_deep_chain_limits_indentation(tmp_path):
    paths = [listed(tmp_path, "run-000")]
    for number in range(1, 40):
        paths.append(listed(tmp_path, f"run-{number:03d}", paths[-1]))
    assert [row.depth for row in arrange(paths[::-1])] == [min(number, MAX_DEPTH) for number in range(40)]
