"""From a command line to a recipe: flags beat yaml beats the recipe, and impossible wishes are refused in words."""

import os

import pytest
import torch

from lockstep.cli.options import LaunchOptions, parse_recipe, parse_start, resolve_procs
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.registry import RECIPES, find_recipe


def ask(*words):
    """The recipe that `lockstep train WORDS` would train."""
    start, rest, _ = parse_start(words, "train", "Train.")
    return parse_recipe(start, rest, "lockstep train")


def start_of(*words):
    return parse_start(words, "train", "Train.")[0]


def refused(*words):
    with pytest.raises(ConfigError) as caught:
        ask(*words)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- who beats whom


def test_flags_beat_yaml_and_yaml_beats_the_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: {size: 9, num_envs: 64}\nalgo.learning_rate: 1e-3\nrun: {seed: 5}\n")
    recipe = ask("snake-ppo", "--config", str(path), "--task.size", "7")
    assert recipe.task.size == 7  # the flag
    assert recipe.task.num_envs == 64  # the file
    assert recipe.algo.learning_rate == 1e-3  # the file, where yaml itself reads text
    assert recipe.run.seed == 5
    assert recipe.algo.rollout_steps == find_recipe("snake-ppo")().algo.rollout_steps  # the recipe


def test_a_key_and_value_beats_yaml_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: {size: 9}\n")
    assert ask("snake-ppo", "--config", str(path), "task.size=7").task.size == 7


def test_yaml_beats_smoke_and_smoke_beats_a_preset(tmp_path):
    kind = find_recipe("snake-ppo")
    path = tmp_path / "mine.yaml"
    path.write_text("algo: {epochs: 3}\n")
    recipe = ask("snake-ppo", "--preset", "small", "--smoke", "--config", str(path))
    assert recipe.task.size == kind.smoke_overrides["task"]["size"] != kind.presets["small"]["task.size"]
    assert recipe.algo.epochs == 3 != kind.smoke_overrides["algo"]["epochs"]


def test_a_preset_changes_the_recipe():
    assert ask("snake-ppo", "--preset", "small").task.size == 8
    assert ask("snake-ppo", "--preset", "base").task.size == 12
    assert ask("snake-ppo", "--preset", "large").task.size == 16


def test_an_unknown_preset_is_refused_with_those_there_are():
    text = refused("snake-ppo", "--preset", "samll")
    assert text.startswith("snake-ppo has no preset 'samll'.\nIt has: ")
    assert "small" in text


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_its_smoke_setting_and_its_presets_pass_their_own_checks(name):
    for words in [[], ["--smoke"], *(["--preset", preset] for preset in find_recipe(name).presets)]:
        assert ask(name, *words).run.lanes == 8


# ---------------------------------------------------------------------------------------------------------- other words


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
def test_the_words_of_the_snake_guide_set_the_recipes_fields(word, value, field, wanted):
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


def test_resume_from_is_resume():
    assert start_of("snake-ppo", "--resume-from", "runs/a").resume == "runs/a"
    assert start_of("snake-ppo", "resume_from=runs/a").resume == "runs/a"


def test_num_gpus_and_world_size_are_processes():
    assert start_of("snake-ppo", "--num-gpus", "3").procs == 3
    assert start_of("snake-ppo", "world_size=3").procs == 3
    assert start_of("snake-ppo", "-n", "3").procs == 3


def test_a_gymnasium_task_may_be_named_by_any_of_its_words():
    for line in (["--env", "Pendulum-v1"], ["env_id=Pendulum-v1"], ["task=Pendulum-v1"], ["--task.id", "Pendulum-v1"]):
        assert ask("gym-ppo", *line).task.id == "Pendulum-v1"


def network_of(recipe):
    """Channels of the convolutions that a recipe would train."""
    task = recipe.task.build(Lanes(1, range(1), 0), torch.device("cpu"))
    net = ActorCritic(task.observation_space, make_distribution(task.action_space), recipe.algo.encoder)
    return [module.out_channels for module in net.modules() if isinstance(module, torch.nn.Conv2d)]


@pytest.mark.parametrize("smoke", [[], ["--smoke"]])
def test_policy_width_and_depth_change_the_network_of_snake(smoke):
    assert network_of(ask("snake-ppo", *smoke)) == list(ask("snake-ppo", *smoke).algo.encoder.widths) != []
    assert network_of(ask("snake-ppo", *smoke, "--policy-width", "24", "--policy-depth", "4")) == [24] * 4
    assert set(network_of(ask("snake-ppo", *smoke, "policy_width=24"))) == {24}
    assert len(network_of(ask("snake-ppo", *smoke, "--policy-depth=4"))) == 4


# ---------------------------------------------------------------------------------------------------- where words stand


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
def test_the_recipe_may_stand_anywhere_among_the_flags(line):
    recipe = ask(*line)
    assert recipe.name == "snake-ppo"
    assert recipe.run.seed == 3
    assert recipe.run.total_samples == find_recipe("snake-ppo").smoke_overrides["run"]["total_samples"]


@pytest.mark.parametrize(
    "line", [["snake-pp"], ["--seed", "3", "snake-pp"], ["snake-pp", "--seed", "3"], ["--smoke", "snake-pp"]]
)
def test_a_misspelt_recipe_gets_a_suggestion_wherever_it_stands(line):
    assert refused(*line) == "there is no recipe 'snake-pp'.\nDid you mean 'snake-ppo'?"


def test_a_misspelt_flag_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as caught:
        ask("snake-ppo", "--task.sise", "8")
    assert caught.value.code == 2
    told = capsys.readouterr()
    assert "--task.size" in told.err + told.out


def test_a_misspelt_key_gets_a_suggestion():
    assert refused("snake-ppo", "task.sise=8").endswith("Did you mean 'size'?")
    assert refused("snake-ppo", "algo.encoder.hiden_sizes=8").endswith("Did you mean 'hidden_sizes'?")


def test_a_misspelt_key_in_yaml_gets_a_suggestion(tmp_path):
    (tmp_path / "a.yaml").write_text("task: {sise: 8}\n")
    assert refused("snake-ppo", "--config", str(tmp_path / "a.yaml")).endswith("Did you mean 'size'?")


def test_a_dropped_word_is_told_once():
    start, rest, notes = parse_start(["snake-ppo", "--master-port", "29500", "--smoke"], "train", "Train.")
    assert notes == ["--master-port is not needed: a free port is found by itself on one machine."]
    assert start.smoke
    assert rest == []


def test_episodes_are_refused_where_a_recipe_has_none_of_a_fixed_length():
    assert refused("snake-ppo", "--episodes", "10").endswith("Use --run.total-samples.")


# ---------------------------------------------------------------------------------------------------- impossible wishes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--task.num-envs", "100"], "num_envs is 100, which 8 lanes cannot share evenly.\nUse 96 or 104"),
        (["--task.num-envs", "0"], "num_envs is 0"),
        (["--batch-size", "100"], "batch_size is 100, which 8 lanes cannot share evenly.\nUse 96 or 104."),
        (["--batch-size", "1000"], "an iteration collects 128 x 64 = 8192 samples"),
        (["--total-timesteps", "0"], "run.total_samples is 0.\nTrain for at least one sample."),
        (["--run.lanes", "0"], "run.lanes is 0."),
        (["--run.lanes", "4", "--procs", "5"], "5 processes cannot host 4 lanes"),
        (["--procs", "0", "--run.lanes", "8"], "0 processes cannot host 8 lanes"),
        (["task.size=2"], "size is 2, too small"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_any_process_starts(line, words):
    assert refused("snake-ppo", *line).startswith(words)


@pytest.mark.parametrize("size", [24, 1000, 3000, 8200])
def test_the_batch_size_that_is_suggested_works(size):
    suggestion = refused("snake-ppo", "--batch-size", str(size)).split("--algo.batch-size ")[1].split(",")[0]
    assert ask("snake-ppo", "--batch-size", suggestion).algo.batch_size == int(suggestion)


def test_a_run_has_a_lane_for_each_process_if_they_are_more_than_eight():
    assert ask("snake-ppo").run.lanes == 8
    assert ask("snake-ppo", "--procs", "3").run.lanes == 8
    assert ask("snake-ppo", "--procs", "16").run.lanes == 16
    assert ask("snake-ppo", "--run.lanes", "4").run.lanes == 4


def test_the_gpus_chosen_are_the_only_ones_seen_and_get_a_process_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert resolve_procs(LaunchOptions()) == 1
    assert resolve_procs(LaunchOptions(gpus="2,3")) == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert resolve_procs(LaunchOptions(gpus="0", procs=4)) == 4


def test_procs_auto_is_one_where_there_is_no_gpu():
    assert resolve_procs(LaunchOptions(procs="auto")) == 1
