"""The file of an experiment: what is written is read again, and invalid or hostile files are refused."""

import json

import pytest

from helpers.experiments import write_experiment
from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.experiment.record import describe_seeds, overall_state, read_experiment, run_directory


def test_record_is_read_as_written(tmp_path):
    record = read_experiment(write_experiment(tmp_path / "exp", seeds=(3, 4)))
    assert (record.recipe, record.seeds, record.procs, record.total_samples) == ("gym-ppo", (3, 4), 1, 4000)
    assert record.command == "lockstep train gym-ppo --seeds 2"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seeds", []),
        ("seeds", ["../../etc"]),
        ("seeds", [-1]),
        ("seeds", [1, 1]),
        ("seeds", [True]),
        ("seeds", [10**30]),
        ("seeds", list(range(1001))),
        ("procs", 0),
        ("procs", 10**9),
        ("recipe", ""),
        ("recipe", None),
        ("recipe", "gym\u001b[2J"),
        ("command", 3),
        ("init_from", 3),
        ("settings", []),
        ("settings", {"run": {"total_samples": "many"}}),
        ("settings", {"run": {"total_samples": 0}}),
        ("format", "1"),
        ("format", 0),
        ("format", True),
    ],
)
def test_record_with_invalid_value_is_refused_by_all_commands(tmp_path, capsys, key, value):
    path = write_experiment(tmp_path / "exp")
    values = json.loads((path / "experiment.json").read_text())
    (path / "experiment.json").write_text(json.dumps(values | {key: value}))
    with pytest.raises(ConfigError, match=key):
        read_experiment(path)
    assert main(["report", str(path), "--out", str(tmp_path / "report.html")]) == 2
    assert main(["ls", str(tmp_path)]) == 0
    assert "experiment.json cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1, "format": 1}', '{"format": 1}', "[" * 9999])
def test_record_that_is_not_an_experiment_is_refused(tmp_path, text):
    path = write_experiment(tmp_path / "exp")
    (path / "experiment.json").write_text(text)
    with pytest.raises(ConfigError, match=r"experiment\.json"):
        read_experiment(path)


def test_record_of_newer_format_names_both_formats(tmp_path):
    path = write_experiment(tmp_path / "exp")
    values = json.loads((path / "experiment.json").read_text())
    (path / "experiment.json").write_text(json.dumps(values | {"format": 7}))
    with pytest.raises(ConfigError, match=r"has format 7, and Lockstep .* knows formats up to 1"):
        read_experiment(path)


def test_links_in_an_experiment_are_refused(tmp_path):
    path = write_experiment(tmp_path / "exp")
    (tmp_path / "other").mkdir()
    (path / "seed-5").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="seed-5 is a link"):
        run_directory(path, 5)
    (path / "experiment.json").rename(tmp_path / "moved.json")
    (path / "experiment.json").symlink_to(tmp_path / "moved.json")
    with pytest.raises(ConfigError, match="is a link"):
        read_experiment(path)


def test_seeds_and_state_are_described_briefly():
    assert [describe_seeds(seeds) for seeds in ([4], [0, 1], [0, 1, 2], [3, 7], range(1, 9))] == [
        "4",
        "0, 1",
        "0-2",
        "3, 7",
        "1-8",
    ]
    states = (["finished"] * 2, ["finished", "running"], ["failed", "preempted"], ["finished", "-"])
    assert [overall_state(each) for each in states] == ["finished", "running", "failed", "incomplete"]
