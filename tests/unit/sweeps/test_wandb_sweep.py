"""The file for `wandb sweep`: its words are those that W&B's agent puts on the command line of a valid training."""

import pytest
import yaml

from lockstep.cli import main
from lockstep.cli.options import parse_recipe, parse_train, resolve

SPACE = """
algo.learning_rate: {low: 1e-5, high: 1e-2, log: true}
algo.epochs: {low: 1, high: 9, step: 2}
algo.encoder.hidden_sizes: [[32, 32], [64]]
"""


def test_wandb_sweep_has_the_space_and_a_command_that_trains(tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    words = ["sweep", "gym-ppo", "--space", "space.yaml", "--procs", "2", "--trials", "30", "--wandb-sweep"]
    assert main([*words, "task.num_envs=16"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["parameters"] == {
        "algo.learning_rate": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2},
        "algo.epochs": {"distribution": "q_uniform", "q": 2, "min": 1, "max": 9},
        "algo.encoder.hidden_sizes": {"values": ["32,32", "64"]},
    }
    assert (config["run_cap"], config["metric"]["goal"]) == (30, "maximize")
    assert not (tmp_path / "runs").exists()

    chosen = {"algo.learning_rate": 0.002, "algo.epochs": 3, "algo.encoder.hidden_sizes": "32,32"}
    arguments = wandb.create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
    *command, macro = config["command"]
    assert (command[:3], macro) == (["lockstep", "train", "gym-ppo"], "${args_no_hyphens}")
    options, rest, _ = parse_train([*command[2:], *arguments["args_no_hyphens"]])
    recipe = resolve(parse_recipe(options, rest, "lockstep train"), 2)
    assert (options.procs, recipe.task.num_envs, recipe.run.wandb) == (2, 16, True)
    assert (recipe.algo.learning_rate, recipe.algo.epochs, recipe.algo.encoder.hidden_sizes) == (0.002, 3, (32, 32))
