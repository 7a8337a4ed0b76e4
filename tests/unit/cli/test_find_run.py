"""Runs that a command line names by number, by episode or as the newest one."""

import os

import pytest

from lockstep.checkpoint.naming import CheckpointName
from lockstep.cli import main
from lockstep.cli.find_run import newest_run, resolve_init_from, runs_of
from lockstep.config import ConfigError, apply_overrides
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, STATUS
from lockstep.recipes.gym_ppo import GymPPO
from lockstep.recipes.team_ddpg import TeamDDPG
from lockstep.run_dir import to_yaml


@pytest.fixture
def recipe(tmp_path):
    return apply_overrides(TeamDDPG(), {"run.runs_dir": str(tmp_path)})


def write_run(recipe, name, started, active=None):
    """Write a run directory that was started and last active at the given seconds."""
    path = recipe.run.runs_dir + f"/{name}"
    os.makedirs(f"{path}/{CHECKPOINTS}")
    for file, seconds in (
        (CONFIG, started),
        (STATUS, active or started),
        (f"{CHECKPOINTS}/attempt-0001.json", started),
    ):
        with open(f"{path}/{file}", "w") as written:
            written.write(to_yaml(recipe) if file == CONFIG else "{}")
        os.utime(f"{path}/{file}", (seconds, seconds))
    return path


def test_runs_of_a_recipe_are_in_the_order_of_their_start(recipe):
    write_run(recipe, "b", started=100)
    write_run(recipe, "a", started=200)
    write_run(apply_overrides(GymPPO(), {"run.runs_dir": recipe.run.runs_dir}), "other", started=150)
    assert [run.name for run in runs_of(recipe)] == ["b", "a"]


def test_newest_run_is_the_one_active_last(recipe):
    write_run(recipe, "resumed", started=100, active=300)
    write_run(recipe, "later", started=200)
    assert newest_run(recipe).name == "resumed"


def test_newest_run_without_runs_is_refused(recipe):
    with pytest.raises(ConfigError, match="no run of team-ddpg"):
        newest_run(recipe)


def test_number_is_the_run_in_order_of_start(recipe):
    write_run(recipe, "first", started=100)
    second = write_run(recipe, "second", started=200)
    source, note = resolve_init_from(recipe, "2")
    assert source == second
    assert note == f"Run 2 of team-ddpg is {second}."
    with pytest.raises(ConfigError, match="there is no run 3 of team-ddpg"):
        resolve_init_from(recipe, "3")


def test_path_is_unchanged(recipe):
    assert resolve_init_from(recipe, "runs/x@500") == ("runs/x@500", "")


def test_episode_is_the_nearest_checkpoint(recipe, monkeypatch):
    path = write_run(recipe, "run", started=100)
    saved = [CheckpointName(samples, 1) for samples in (9_000, 10_100, 12_000)]
    monkeypatch.setattr("lockstep.checkpoint.lineage.lineage", lambda directory: saved)
    source, note = resolve_init_from(recipe, f"{path}@50ep")
    assert source == f"{path}@10100"
    assert "10,000" in note
    assert "10,100" in note


def test_bare_resume_resumes_the_newest_run(recipe, monkeypatch, capsys):
    write_run(recipe, "old", started=100)
    newest = write_run(recipe, "new", started=200)
    resumed = []
    monkeypatch.setattr("lockstep.cli.resume.run", lambda arguments: resumed.append(arguments) or 0)
    line = ["train", "team-ddpg", "--resume", "--procs", "2", f"run.runs_dir={recipe.run.runs_dir}"]
    assert main(line) == 0
    assert resumed[0][:3] == [newest, "--procs", "2"]
    assert newest in capsys.readouterr().err
