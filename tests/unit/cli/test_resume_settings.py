"""Settings that a resume may change: they take effect, are recorded, and change nothing that is saved."""

import dataclasses
import json
import typing
from contextlib import closing

import pytest
import torch
import yaml

import lockstep
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.cli import main
from lockstep.cli.resume import CHANGEABLE, change_settings
from lockstep.config import ConfigError, RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.inference import load_algorithm, load_recipe
from lockstep.protocols import AppendOnlyTensor
from lockstep.registry import find_recipe
from lockstep.training_loop import train

RECIPES = ("snake-ppo", "gym-ppo", "gym-ddpg", "gym-sac", "dmc-tdmpc2")


@pytest.fixture
def run(tmp_path):
    return train(tiny(tmp_path, total_samples=2 * ITERATION)).path


def network(run, at):
    return load_algorithm(run, load_recipe(run), at).model_state_dict()


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("rate", ["0.0", "1e-3"])
def test_changed_learning_rate_takes_effect_and_is_recorded(run, capsys, rate):
    before = load_recipe(run).algo.learning_rate
    capsys.readouterr()
    assert main(["resume", str(run), "--total-samples", str(3 * ITERATION), "--algo.learning-rate", rate]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Changed from {2 * ITERATION} samples: algo.learning_rate {before} -> {float(rate)}." in text
    assert f"run.total_samples {2 * ITERATION} -> {3 * ITERATION}." in text
    assert same(network(run, 2 * ITERATION), network(run, 3 * ITERATION)) == (float(rate) == 0)
    assert yaml.safe_load((run / "config.yaml").read_text())["algo"]["learning_rate"] == float(rate)
    (line,) = map(json.loads, (run / "config_changes.jsonl").read_text().splitlines())
    assert line["samples"] == 2 * ITERATION
    assert line["changes"]["algo.learning_rate"] == [before, float(rate)]
    assert line["changes"].keys() == {"algo.learning_rate", "run.total_samples"}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_stop_at_exits_with_0_and_keeps_schedules(run, processes):
    end, halfway = 6 * ITERATION, 4 * ITERATION
    command = ["resume", str(run), "--total-samples", str(end), "--procs", str(processes), "--stop-at", str(halfway)]
    assert main(command) == 0
    assert json.loads((run / "status.json").read_text())["state"] == "preempted"
    assert sorted(int(path.name[:12]) for path in (run / "checkpoints").glob("0*"))[-1] == halfway
    assert load_recipe(run).run.total_samples == end


def test_stop_at_with_seeds_is_refused(capsys):
    assert main(["train", "gym-ppo", "--smoke", "--seeds", "2", "--stop-at", "100"]) == 2
    assert "--stop-at stops one run" in capsys.readouterr().err


def test_resume_without_changes_records_nothing(run):
    lockstep.resume(run, overrides={"algo.gamma": load_recipe(run).algo.gamma, "task.size": 4})
    assert not (run / "config_changes.jsonl").exists()


def test_resume_from_python_changes_settings(run):
    lockstep.resume(run, overrides={"algo.entropy_coef": 0.5}, total_samples=3 * ITERATION)
    assert load_recipe(run).algo.entropy_coef == 0.5


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        (["--algo.encoder.out-features", "16"], "--algo.encoder.out-features 16"),
        (["task.size=5"], "--task.size 5"),
        (["--run.seed", "3"], "--run.seed 3"),
        (["algo.encoder.hidden_sizes=8,16"], "--algo.encoder.hidden-sizes 8 16"),
    ],
)
def test_other_change_error_names_command_for_new_run(run, capsys, flags, command):
    capsys.readouterr()
    assert main(["resume", str(run), *flags]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "cannot be changed when a run is resumed" in text
    assert f"lockstep train snake-ppo --init-from {run} {command}" in text
    assert load_recipe(run).run.total_samples == 2 * ITERATION


def test_unknown_setting_error_suggests_name(run):
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        change_settings(load_recipe(run), {"algo.learning_rte": 1}, run)


def other_value(value, kind):
    """Return another value of a setting."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return ("other",)
    return 0.25 if value is None else value * 2 or (1 if kind is int else 0.25)


def layout(algorithm):
    """Return names, dtypes and shapes of everything that a checkpoint contains of an agent."""
    state = {**algorithm.shared_state(), **algorithm.lane_state(0), **algorithm.task.lane_state(0)}
    fixed = {name: x for name, x in state.items() if not isinstance(x, AppendOnlyTensor)}
    rows = {name: (x.capacity, x.all().dtype, x.all().shape[1:]) for name, x in state.items() if name not in fixed}
    return {name: (x.dtype, x.shape) for name, x in fixed.items()}, rows


@pytest.mark.parametrize("name", RECIPES)
def test_changeable_settings_change_nothing_that_is_saved(name):
    if name.startswith("dmc"):
        pytest.importorskip("dm_control")
    recipe = find_recipe(name)
    recipe = apply_overrides(recipe(), recipe.smoke_overrides)
    changes = {}
    for group in ("task", "algo"):
        config = getattr(recipe, group)
        for field in config.changeable_on_resume:
            value = getattr(config, field)
            parts = {f"{field}.{f.name}": value for f in dataclasses.fields(value)} if field in ("loss", "plan") else {}
            for key in parts or (field,):
                owner, leaf = (value, key.partition(".")[2]) if parts else (config, field)
                hints = typing.get_type_hints(type(owner))
                changes[f"{group}.{key}"] = other_value(getattr(owner, leaf), hints[leaf])
    assert len(changes) > 10
    changed = apply_overrides(recipe, changes)
    layouts = []
    for each in (recipe, changed):
        runtime = Runtime.single_process(each.run)
        with closing(each.task.build(runtime.lanes, runtime.device)) as task:
            layouts.append(layout(each.algo.build(task, runtime)))
    assert layouts[0] == layouts[1]
    assert change_settings(recipe, changes, "run") == changed


def test_changeable_settings_of_run_exist():
    assert {*CHANGEABLE} <= {field.name for field in dataclasses.fields(RunConfig)}
