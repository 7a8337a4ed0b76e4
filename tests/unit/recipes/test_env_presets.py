"""Presets by environment: which ids have one, precedence of flags, the printed note, and the recipes' own tasks."""

import pytest

import lockstep.api as api
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.recipes.env_presets import ENV_PRESETS, find_env_preset
from lockstep.recipes.ppo_presets import FAMILIES
from lockstep.registry import RECIPES, find_recipe


def ask(*words):
    start, rest, _ = parse_train(words)
    return resolve(parse_recipe(start, rest, "lockstep train", start.config), 1)


@pytest.mark.parametrize("name", RECIPES)
def test_default_task_of_a_recipe_has_no_automatic_preset(name):
    assert find_env_preset(find_recipe(name)()) is None


@pytest.mark.parametrize(
    ("recipe", "id", "preset"),
    [
        ("gym-ppo", "Hopper-v5", "mujoco"),
        ("gym-ppo", "HalfCheetah-v4", "mujoco"),
        ("gym-ppo", "InvertedPendulum-v5", "mujoco"),
        ("gym-ppo", "ALE/Pong-v5", "atari"),
        ("gym-ppo", "PongNoFrameskip-v4", "atari"),
        ("gym-ppo", "MinAtar/Breakout-v1", "minatar"),
        ("gym-ppo", "minigrid:MiniGrid-DoorKey-5x5-v0", "minigrid"),
        ("gym-ppo", "Acrobot-v1", "acrobot"),
        ("gym-ppo", "MountainCar-v0", "mountain-car"),
        ("gym-ppo", "MountainCarContinuous-v0", None),
        ("gym-ppo", "Pendulum-v1", "continuous"),
        ("gym-ppo", "LunarLander-v3", "lunar-lander"),
        ("gym-ppo", "BipedalWalker-v3", "bipedal-walker"),
        ("gym-ppo", "CartPole-v1", None),
        ("gym-ppo", "my_env.py:Hopper-v5", None),
        ("gym-ppo-lstm", "Hopper-v5", None),
        ("gym-ddpg", "Hopper-v5", "mujoco"),
        ("gym-ddpg", "Acrobot-v1", None),
        ("gym-sac", "Walker2d-v4", "mujoco"),
    ],
)
def test_preset_is_chosen_by_environment_and_printed(recipe, id, preset, capsys):
    found, given = ask(recipe, "--task.id", id), ask(recipe, "--task.id", id, "--preset", preset or "none")
    assert found == given
    told = capsys.readouterr().err
    assert (f"{id}: preset {preset}. Flags take precedence" in told) == (preset is not None)
    assert told.count("preset") <= 2  # printed once, for the choice that was automatic


def test_every_pattern_is_used_by_a_recipe():
    presets = {preset for name in RECIPES for preset in find_recipe(name).presets}
    assert ENV_PRESETS.keys() <= presets
    assert FAMILIES.keys() <= ENV_PRESETS.keys()


@pytest.mark.parametrize("preset", FAMILIES)
def test_preset_is_valid_with_the_smoke_setting(preset):
    assert ask("gym-ppo", "--smoke", "--preset", preset).run.lanes == 8


def test_flags_yaml_and_smoke_take_precedence_over_an_automatic_preset(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("task: {id: Hopper-v5}\nalgo: {batch_size: 128}\n")
    recipe = ask("gym-ppo", "--config", str(file), "algo.epochs=3")
    assert (recipe.algo.batch_size, recipe.algo.epochs, recipe.algo.rollout_steps) == (128, 3, 256)
    assert recipe.algo.reference_batch_size == 64  # that of the preset, for which the learning rate was tuned
    smoke = ask("gym-sac", "--smoke", "env=Hopper-v5")
    assert (smoke.algo.batch_size, smoke.algo.actor_lr) == (32, 3e-4)


def test_named_preset_or_none_replaces_the_automatic_one():
    assert ask("gym-ddpg", "env=Hopper-v5", "--preset", "td3").algo.actor_lr == 1e-3
    assert ask("gym-ddpg", "env=Hopper-v5", "--preset", "none").algo == ask("gym-ddpg").algo


def test_python_api_chooses_the_preset_for_recipes_by_name_only(capsys):
    settings = {"task": {"id": "Hopper-v5"}}
    assert api.resolve_recipe("gym-sac", False, "auto", 1, settings).algo.learning_starts == 10_000
    assert "Hopper-v5: preset mujoco" in capsys.readouterr().err
    assert api.resolve_recipe("gym-sac", False, None, 1, settings).algo.learning_starts == 1_000
    assert api.resolve_recipe(find_recipe("gym-sac")(), False, "auto", 1, settings).algo.learning_starts == 1_000
    assert not capsys.readouterr().err


def test_default_recipes_keep_their_settings():
    ppo, ddpg = (ask(name).algo for name in ("gym-ppo", "gym-ddpg"))
    assert (ppo.learning_rate, ppo.rollout_steps, ppo.epochs, ppo.batch_size) == (1e-3, 32, 20, 256)
    assert (ddpg.actor_lr, ddpg.twin_critics, ddpg.max_grad_norm, ddpg.critic_action_input) == (
        1e-3,
        False,
        10.0,
        "last",
    )


def test_off_policy_mujoco_presets_are_the_published_settings():
    td3, sac = (ask(name, "--task.id", "Hopper-v4").algo for name in ("gym-ddpg", "gym-sac"))
    for algo in (td3, sac):
        assert algo.encoder.widths == (256, 256)
        assert (algo.batch_size, algo.gamma, algo.tau, algo.buffer_size) == (256, 0.99, 0.005, 1_000_000)
        assert (algo.actor_lr, algo.critic_lr, algo.max_grad_norm, algo.critic_action_input) == (
            3e-4,
            3e-4,
            None,
            "first",
        )
    assert (td3.learning_starts, td3.exploration_noise, td3.epsilon) == (25_000, 0.1, 0.0)
    assert (td3.twin_critics, td3.policy_delay, td3.target_noise) == (True, 2, 0.2)
    assert (sac.learning_starts, sac.temperature, sac.target_entropy) == (10_000, None, None)
