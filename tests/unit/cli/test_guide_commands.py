"""Commands of the five guides and of other tools: what their words become, with their units."""

import pytest

from lockstep.cli.options import parse_recipe, parse_train
from lockstep.config import ConfigError

EVASION = 40_000 * 200

COMMANDS = {
    # Snake
    "snake-ppo --total-timesteps 1e6 --n-envs 64 --n-steps 128 --batch-size 2048 --policy-width 128 --policy-depth 2": {
        "run.total_samples": 1_000_000,
        "task.num_envs": 64,
        "algo.rollout_steps": 128,
        "algo.batch_size": 2048,
        "algo.encoder.hidden_sizes": (128,),
        "algo.encoder.num_layers": 2,
    },
    "snake-ppo --precision bf16 --seed 3 --run-name first --device cpu": {
        "run.precision": "bf16",
        "run.seed": 3,
        "run.name": "first",
        "run.device": "cpu",
    },
    # Team snakes: intervals and limits in episodes of 200 steps
    "team-ddpg --max_episodes 50000 --save_interval 1000 --a_lr 1e-4 --c_lr 1e-3 --tau 0.01 --buffer_size 1e5": {
        "run.total_samples": 10_000_000,
        "run.save_every": 200_000,
        "algo.actor_lr": 1e-4,
        "algo.critic_lr": 1e-3,
        "algo.tau": 0.01,
        "algo.buffer_size": 100_000,
    },
    "team-ddpg --enable_opponent_evasion": {"task.evade_after_samples": EVASION},
    "team-ddpg --enable_opponent_evasion --opponent_evasion_start_episode 30": {"task.evade_after_samples": 6_000},
    "team-ddpg --enable_opponent_evasion false": {"task.evade_after_samples": None},
    "team-ddpg --opponent_difficulty_strategy exponential --gamma 0.95": {
        "task.level_schedule": "exponential",
        "algo.gamma": 0.95,
    },
    "team-ddpg --max_episodes 100 --task.max-episode-steps 50": {"run.total_samples": 5_000},
    # Trading: transitions per update, intervals in episodes of 256 steps
    "trading-lstm --update-interval 512 --checkpoint-interval 500 --episodes 1000": {
        "algo.rollout_steps": 8,
        "algo.batch_size": 512,
        "algo.bptt_steps": 8,
        "run.save_every": 128_000,
        "run.total_samples": 256_000,
    },
    # TD-MPC2
    "dmc-tdmpc2 task=dog-run model_size=5 steps=1000 eval_freq=500 buffer_size=100_000 sync_freq=1": {
        "task.tasks": ("dog-run",),
        "algo.model.size": 5,
        "run.total_samples": 1_000,
        "run.eval_every": 500,
        "algo.buffer_size": 100_000,
        "algo.grad_accum_steps": 1,
    },
    "dmc-tdmpc2 enable_wandb=true wandb_project=p wandb_entity=e": {
        "run.wandb": True,
        "run.wandb_project": "p",
        "run.wandb_entity": "e",
    },
    # Stable-Baselines3 and CleanRL
    "gym-ppo --env Acrobot-v1 --ent-coef 0.01 --clip-range 0.1 --n-epochs 4 --vf-coef 0.25 --gae-lambda 0.9": {
        "task.id": "Acrobot-v1",
        "algo.entropy_coef": 0.01,
        "algo.clip_coef": 0.1,
        "algo.epochs": 4,
        "algo.value_coef": 0.25,
        "algo.gae_lambda": 0.9,
    },
    "gym-ppo --env-id Acrobot-v1 --num-envs 16 --num-steps 64 --num-minibatches 4 --update-epochs 3 --anneal-lr": {
        "task.id": "Acrobot-v1",
        "task.num_envs": 16,
        "algo.rollout_steps": 64,
        "algo.batch_size": 256,
        "algo.epochs": 3,
        "algo.schedule": "linear",
    },
    "gym-ppo --anneal-lr run.seed=3 --compile -n 2": {
        "algo.schedule": "linear",
        "run.seed": 3,
        "run.compile": "on",
    },
    "gym-ppo --run.eval-every none --run.save-every 1e5": {"run.eval_every": None, "run.save_every": 100_000},
    "gym-ddpg --learning-starts 500 --policy-frequency 2 --policy-noise 0.3 --exploration-noise 0.2 --track false": {
        "algo.learning_starts": 500,
        "algo.policy_delay": 2,
        "algo.target_noise": 0.3,
        "algo.exploration_noise": 0.2,
        "run.wandb": False,
    },
}


def recipe_of(line):
    options, rest, _ = parse_train(line.split())
    return parse_recipe(options, rest, "lockstep train")


def value_of(recipe, key):
    for name in key.split("."):
        recipe = getattr(recipe, name)
    return recipe


@pytest.mark.parametrize(("line", "settings"), COMMANDS.items())
def test_command_of_a_guide_means_what_it_meant(line, settings):
    recipe = recipe_of(line)
    assert {key: value_of(recipe, key) for key in settings} == settings


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("team-ddpg --max_episodes 500", ("500", "100,000")),
        ("team-ddpg --save_interval 1000", ("1000", "200,000")),
        ("team-ddpg --enable_opponent_evasion", ("40,000", "8,000,000")),
        ("trading-lstm --update-interval 512", ("512", "8 steps of 64 environments")),
        ("trading-lstm --checkpoint-interval 500", ("500", "128,000")),
        ("gym-ppo --num-minibatches 4", ("4", "batch_size 64")),
    ],
)
def test_conversion_is_printed_with_both_numbers(line, numbers, capsys):
    recipe_of(line)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert all(number in lines[0] for number in numbers)


def test_factor_per_episode_gives_the_epsilon_of_the_guide():
    recipe = recipe_of("team-ddpg --max_episodes 20000 --epsilon 0.9 --epsilon_speed 0.9995")
    for episode in (0, 1, 100, 5_000):
        progress = episode * 200 / recipe.run.total_samples
        assert recipe.algo.epsilon_at(progress) == pytest.approx(0.9 * 0.9995**episode)
    assert recipe.algo.epsilon_at(1.0) == pytest.approx(0.02)  # epsilon_end of the recipe


def test_epochs_of_a_data_set_become_samples(capsys):
    recipe = recipe_of("cricket-gnn --smoke --epochs 3")
    assert recipe.run.total_samples % 3 == 0
    assert f"{recipe.run.total_samples:,} samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("gym-ppo --episodes 20", "--episodes counts episodes, but episodes of this recipe have no fixed length."),
        ("gym-ppo --save-interval 20", "--save-interval counts episodes"),
        ("team-ddpg --episodes many", "--episodes is 'many', which is not a whole number."),
        ("team-ddpg --episodes", "--episodes is '', which is not a whole number."),
        ("team-ddpg --epsilon_speed 2", "--epsilon-speed is '2', which is not a factor between 0 and 1."),
        ("team-ddpg --epochs 3", "--epochs counts passes over a data set, but team-ddpg has none."),
        ("gym-ppo --num-minibatches 3", "--num-minibatches is 3, which does not divide the 256 samples"),
        ("cricket-gnn --num-minibatches 4", "--num-minibatches cannot be converted: cricket-gnn has no task.num_envs."),
        ("gym-ddpg --update-interval 512", "--update-interval cannot be converted: gym-ddpg has no algo.bptt_steps."),
        ("gym-ddpg --epsilon_speed 0.9", "--epsilon-speed cannot be converted: gym-ddpg has no task.episode_steps."),
        ("gym-ppo --epsilon_speed 0.9", "--epsilon-speed cannot be converted: gym-ppo has no algo.epsilon."),
        ("team-ddpg --epsilon 0 --epsilon_speed 0.9", "--epsilon-speed lowers epsilon, but epsilon is 0 and"),
    ],
)
def test_value_that_cannot_be_converted_is_refused(line, problem):
    with pytest.raises(ConfigError) as caught:
        recipe_of(line)
    assert str(caught.value).startswith(problem)


def test_help_of_a_recipe_shows_presets_options_and_names(capsys):
    with pytest.raises(SystemExit):
        parse_train(["gym-ddpg", "--help"])
    text = capsys.readouterr().out
    for part in (
        "--preset td3",
        "--procs N|auto",
        "--init-from RUN",
        "--algo.actor-lr FLOAT",
        "--a-lr (algo.actor-lr)",
    ):
        assert part in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_infinite_integer_is_an_error_of_the_command_line(capsys):
    with pytest.raises(SystemExit) as caught:
        recipe_of("gym-ppo --run.seed inf")
    assert caught.value.code == 2
    assert "--run.seed" in capsys.readouterr().err
