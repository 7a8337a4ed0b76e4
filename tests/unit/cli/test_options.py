"""Command line to recipe: precedence of flags, YAML and presets; aliases, argument order and invalid settings."""

import os

import pytest
import torch

from lockstep.cli.options import DEBUG_VARIABLES, LaunchOptions, parse_recipe, parse_train, resolve, resolve_procs
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.registry import RECIPES, find_recipe


def ask(*words):
    """Return the recipe that `lockstep train WORDS` trains."""
    start, rest, _ = parse_train(words)
    recipe = parse_recipe(start, rest, "lockstep train", start.config)
    return resolve(recipe, 1 if start.procs in (None, "auto") else start.procs)


def start_of(*words):
    return parse_train(words)[0]


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        ask(*words)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------- precedence


def test_flags_override_yaml_and_yaml_overrides_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: {size: 9, num_envs: 64}\nalgo.learning_rate: 1e-3\nrun: {seed: 5}\n")
    recipe = ask("snake-ppo", "--config", str(path), "--task.size", "7")
    assert recipe.task.size == 7  # the flag
    assert recipe.task.num_envs == 64  # the file
    assert recipe.algo.learning_rate == 1e-3  # the file; YAML reads this number as a string
    assert recipe.run.seed == 5
    assert recipe.algo.rollout_steps == find_recipe("snake-ppo")().algo.rollout_steps  # the recipe


def test_key_and_value_overrides_yaml(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: {size: 9}\n")
    assert ask("snake-ppo", "--config", str(path), "task.size=7").task.size == 7


def test_yaml_overrides_smoke_and_smoke_overrides_preset(tmp_path):
    kind = find_recipe("snake-ppo")
    path = tmp_path / "mine.yaml"
    path.write_text("algo: {epochs: 3}\n")
    recipe = ask("snake-ppo", "--preset", "small", "--smoke", "--config", str(path))
    assert recipe.task.size == kind.smoke_overrides["task"]["size"] != kind.presets["small"]["task.size"]
    assert recipe.algo.epochs == 3 != kind.smoke_overrides["algo"]["epochs"]


def test_preset_changes_recipe():
    assert ask("snake-ppo", "--preset", "small").task.size == 8
    assert ask("snake-ppo", "--preset", "base").task.size == 12
    assert ask("snake-ppo", "--preset", "large").task.size == 16


def test_unknown_preset_error_lists_presets():
    text = refused("snake-ppo", "--preset", "samll")
    assert text.startswith("snake-ppo has no preset 'samll'.\nIt has: ")
    assert "small" in text


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_with_smoke_settings_and_presets_are_valid(name):
    if name == "dmc-tdmpc2":
        pytest.importorskip("dm_control")  # not installed on Python 3.13
    for words in [[], ["--smoke"], *(["--preset", preset] for preset in find_recipe(name).presets)]:
        assert ask(name, *words).run.lanes == 8


# -------------------------------------------------------------------------------------------------------------- aliases


@pytest.mark.parametrize(
    ("word", "value", "field", "wanted"),
    [
        ("total-timesteps", "4096", "run.total_samples", 4096),
        ("n-envs", "64", "task.num_envs", 64),
        ("n-steps", "32", "algo.rollout_steps", 32),
        ("batch-size", "512", "algo.batch_size", 512),
        ("precision", "bf16", "run.precision", "bf16"),
        ("seed", "7", "run.seed", 7),
        ("run-name", "mine", "run.name", "mine"),
        ("device", "cpu", "run.device", "cpu"),
        ("policy-width", "24", "algo.encoder.hidden_sizes", (24,)),
        ("policy-depth", "4", "algo.encoder.num_layers", 4),
        ("grid-size", "8", "task.size", 8),
    ],
)
def test_snake_aliases_set_recipe_fields(word, value, field, wanted):
    underscored = word.replace("-", "_")
    for line in (
        [f"--{word}", value],
        [f"--{word}={value}"],
        [f"--{underscored}", value],
        [f"{underscored}={value}"],
        [f"{word}={value}"],
    ):
        found = ask("snake-ppo", *line)
        for name in field.split("."):
            found = getattr(found, name)
        assert found == wanted, line


def test_resume_from_is_alias_of_resume():
    assert start_of("snake-ppo", "--resume-from", "runs/a").resume == "runs/a"
    assert start_of("snake-ppo", "resume_from=runs/a").resume == "runs/a"


def test_num_gpus_and_world_size_are_aliases_of_procs():
    assert start_of("snake-ppo", "--num-gpus", "3").procs == 3
    assert start_of("snake-ppo", "world_size=3").procs == 3
    assert start_of("snake-ppo", "-n", "3").procs == 3


def test_gymnasium_task_accepts_all_aliases():
    for line in (["--env", "Pendulum-v1"], ["env_id=Pendulum-v1"], ["task=Pendulum-v1"], ["--task.id", "Pendulum-v1"]):
        assert ask("gym-ppo", *line).task.id == "Pendulum-v1"


def network_of(recipe):
    """Return the output channels of all convolutions of a recipe's network."""
    task = recipe.task.build(Lanes(1, range(1), 0), torch.device("cpu"))
    net = ActorCritic(task.observation_space, make_distribution(task.action_space), recipe.algo.encoder)
    return [module.out_channels for module in net.modules() if isinstance(module, torch.nn.Conv2d)]


@pytest.mark.parametrize("smoke", [[], ["--smoke"]])
def test_policy_width_and_depth_change_snake_network(smoke):
    assert network_of(ask("snake-ppo", *smoke)) == list(ask("snake-ppo", *smoke).algo.encoder.widths) != []
    assert network_of(ask("snake-ppo", *smoke, "--policy-width", "24", "--policy-depth", "4")) == [24] * 4
    assert set(network_of(ask("snake-ppo", *smoke, "policy_width=24"))) == {24}
    assert len(network_of(ask("snake-ppo", *smoke, "--policy-depth=4"))) == 4


# ------------------------------------------------------------------------------------------------------- argument order


@pytest.mark.parametrize(
    "line",
    [
        ["snake-ppo", "--seed", "3", "--smoke"],
        ["--smoke", "snake-ppo", "--seed", "3"],
        ["--seed", "3", "--smoke", "snake-ppo"],
        ["--seed", "3", "snake-ppo", "--smoke"],
        ["run.seed=3", "--smoke", "snake-ppo"],
        ["--procs", "2", "snake-ppo", "--smoke", "--run.seed", "3"],
        ["--distributed", "snake-ppo", "--smoke", "--run.seed", "3"],
        ["--smoke", "--run-name", "gym-ppo", "snake-ppo", "--seed", "3"],
    ],
)
def test_recipe_may_be_at_any_position(line):
    recipe = ask(*line)
    assert recipe.name == "snake-ppo"
    assert recipe.run.seed == 3
    assert recipe.run.total_samples == find_recipe("snake-ppo").smoke_overrides["run"]["total_samples"]


@pytest.mark.parametrize(
    "line", [["snake-pp"], ["--seed", "3", "snake-pp"], ["snake-pp", "--seed", "3"], ["--smoke", "snake-pp"]]
)
def test_misspelled_recipe_error_suggests_closest_name(line):
    assert refused(*line) == "there is no recipe 'snake-pp'.\nDid you mean 'snake-ppo'?"


def test_misspelled_flag_error_suggests_closest_name(capsys):
    with pytest.raises(SystemExit) as caught:
        ask("snake-ppo", "--task.sise", "8")
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert "--task.size" in told.err + told.out


def test_misspelled_key_error_suggests_closest_name():
    assert refused("snake-ppo", "task.sise=8").endswith("Did you mean 'size'?")
    assert refused("snake-ppo", "algo.encoder.hiden_sizes=8").endswith("Did you mean 'hidden_sizes'?")


def test_misspelled_yaml_key_error_suggests_closest_name(tmp_path):
    (tmp_path / "a.yaml").write_text("task: {sise: 8}\n")
    assert refused("snake-ppo", "--config", str(tmp_path / "a.yaml")).endswith("Did you mean 'size'?")


def test_unneeded_flag_message_is_returned_once():
    start, rest, notes = parse_train(["snake-ppo", "--master-port", "29500", "--smoke"])
    assert notes == ["--master-port is not needed: on one machine, a free port is chosen automatically."]
    assert start.smoke
    assert rest == []


def test_episodes_without_fixed_length_are_rejected():
    assert refused("snake-ppo", "--episodes", "10").endswith("Use --run.total-samples with a number of samples.")


# ----------------------------------------------------------------------------------------------------- invalid settings


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--task.num-envs", "100"], "num_envs is 100, which 8 lanes cannot share evenly.\nUse 96 or 104"),
        (["--task.num-envs", "0"], "num_envs is 0"),
        (["--batch-size", "100"], "batch_size is 100, which 8 lanes cannot share evenly.\nUse 96 or 104."),
        (["--batch-size", "1000"], "an iteration collects 128 x 64 = 8192 samples"),
        (["--total-timesteps", "0"], "run.total_samples is 0.\nSet it to at least 1."),
        (["--run.lanes", "0"], "run.lanes is 0."),
        (["--run.lanes", "4", "--procs", "5"], "5 processes cannot host 4 lanes"),
        (["--procs", "0", "--run.lanes", "8"], "0 processes cannot host 8 lanes"),
        (["task.size=2"], "size is 2, too small"),
    ],
)
def test_invalid_settings_are_rejected_before_launch(line, words):
    assert refused("snake-ppo", *line).startswith(words)


@pytest.mark.parametrize("size", [24, 1000, 3000, 8200])
def test_suggested_batch_size_is_valid(size):
    suggestion = refused("snake-ppo", "--batch-size", str(size)).split("--algo.batch-size ")[1].split(",")[0]
    assert ask("snake-ppo", "--batch-size", suggestion).algo.batch_size == int(suggestion)


def test_lanes_default_to_eight_or_process_count():
    assert ask("snake-ppo").run.lanes == 8
    assert ask("snake-ppo", "--procs", "3").run.lanes == 8
    assert ask("snake-ppo", "--procs", "16").run.lanes == 16
    assert ask("snake-ppo", "--run.lanes", "4").run.lanes == 4


def test_gpus_option_sets_visible_devices_and_process_count(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert resolve_procs(LaunchOptions()) == 1
    assert resolve_procs(LaunchOptions(gpus="2,3")) == 2
    assert resolve_procs(LaunchOptions(gpus="2,3", procs=1)) == 1
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert resolve_procs(LaunchOptions(gpus="0", procs=4)) == 4


def test_procs_auto_without_gpu_is_one():
    assert resolve_procs(LaunchOptions(procs="auto")) == 1


# ----------------------------------------------------------------------------------------------------------- debugging


def test_debug_level_sets_variables_but_not_those_of_the_user(monkeypatch):
    for variable in DEBUG_VARIABLES["detail"]:
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    resolve_procs(parse_train(["snake-ppo", "--debug", "detail"])[0])
    assert (os.environ["TORCH_DISTRIBUTED_DEBUG"], os.environ["NCCL_DEBUG"]) == ("DETAIL", "TRACE")


INCOMPLETE = """
from dataclasses import dataclass
import lockstep
from lockstep.base import Algorithm

class Half(Algorithm):
    def setup(self): ...
    def collect(self, clock): ...

@dataclass(frozen=True, kw_only=True)
class Mine(lockstep.Recipe):
    task: lockstep.SnakeConfig = lockstep.SnakeConfig()
    algo: Half.Config = Half.Config()
    run: lockstep.RunConfig = lockstep.RunConfig()
"""


def test_missing_methods_of_an_algorithm_are_named_before_training(tmp_path):
    (tmp_path / "half.py").write_text(INCOMPLETE)
    message = refused(str(tmp_path / "half.py"))
    assert message.startswith("Half has no update() and no policy().")
    assert "docs/customization/algorithm.md" in message


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--total-timestep", "--total-timesteps?"), ("--proc", "--procs?"), ("--xyz", "lockstep train gym-ppo --help")],
)
def test_unknown_flag_error_suggests_accepted_names(flag, near):
    message = refused("gym-ppo", flag, "5")
    assert f"there is no flag {flag}." in message
    assert near in message
