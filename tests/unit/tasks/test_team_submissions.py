"""Training games against submissions of other authors: same games on any number of processes and after a restore."""

from collections import Counter
from itertools import product

import numpy as np
import psutil
import pytest
import torch
import yaml

from helpers.submissions import UP, write_chaser
from helpers.team_games import build, random_actions
from lockstep.checkpoint.format_version import FORMAT
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.inference import load_recipe
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.rules import SNAKES, TEAM

CLOCK = TrainState(total_samples=10_000)


def games_against(files, count=8, lanes=2, **settings):
    settings = {"max_episode_steps": 12, "submission_fraction": 0.5, "observation": "egocentric"} | settings
    return build(count, lanes=lanes, control_both_teams=True, submissions=tuple(map(str, files)), **settings)


def play(env, steps, first=0, seed=0):
    """Play with random actions for our team, the script's action for the other; return the games after each step."""
    env.on_iteration_start(CLOCK)
    ours = random_actions(first + steps, env.num_envs, TEAM, seed)[first:]
    idle = torch.full((env.num_envs, TEAM), SCRIPTED)
    after = []
    for actions in ours:
        info = env.step(torch.cat([actions, idle], dim=1)).episode_info
        after.append(env.games.copy())
    return after, info


def same(one, other):
    return all(np.array_equal(x[name], y[name]) for x, y in zip(one, other, strict=True) for name in x.dtype.names)


def test_submissions_play_the_last_environments_of_each_lane(tmp_path):
    (tmp_path / "submission.py").write_text(UP)
    env, scripts = games_against([tmp_path / "submission.py"], observation="features"), build(8, lanes=2)
    env.on_iteration_start(CLOCK)
    rivals = [np.arange(SNAKES)[TEAM:] if game.place % 2 == 0 else np.arange(TEAM) for game in env.games]
    actions = torch.cat([random_actions(1, 8)[0], torch.full((8, TEAM), SCRIPTED)], dim=1)
    env.step(actions)
    scripts.step(actions[:, :TEAM])
    moves = env._submissions.moves
    for row in range(8):
        if row % 4 >= 2:
            ours = np.setdiff1d(np.arange(SNAKES), rivals[row])
            assert not moves[row, 0, rivals[row]].any()  # up
            assert moves[row, 0, ours].tolist() == actions[row, :TEAM].tolist()
        else:
            assert not moves[row].any()
            assert np.array_equal(env.games[row].body, scripts.games[row].body)
    assert not moves[:, 1:].any()
    env.close()


def test_submissions_do_not_play_in_evaluations(tmp_path):
    env, before = games_against([write_chaser(tmp_path)]), psutil.Process().children()
    env.step(torch.cat([random_actions(1, 8)[0], torch.full((8, TEAM), SCRIPTED)], dim=1))  # no on_iteration_start
    assert psutil.Process().children() == before
    assert not env._submissions.moves.any()


def test_submission_games_are_the_same_on_any_number_of_processes(tmp_path):
    file = write_chaser(tmp_path)
    whole = games_against([file])
    expected, info = play(whole, 30)
    assert info["submission_won"].isnan().tolist() == [True, True, False, False] * 2
    for lane in range(2):
        part = games_against([file], local=range(lane, lane + 1))
        part.on_iteration_start(CLOCK)
        ours, idle = random_actions(30, 8)[:, 4 * lane : 4 * lane + 4], torch.full((4, TEAM), SCRIPTED)
        for step, actions in enumerate(ours):
            part.step(torch.cat([actions, idle], dim=1))
            assert same([part.games], [expected[step][4 * lane : 4 * lane + 4]])
        part.close()
    whole.close()


def test_submission_games_continue_after_restore_as_without_it(tmp_path):
    file = write_chaser(tmp_path)
    env = games_against([file])
    play(env, 17)  # in the second games, after 5 of 12 steps
    states = [env.lane_state(lane) for lane in range(2)]
    expected, _ = play(env, 20, first=17)
    env.close()
    restored = games_against([file])
    for lane, state in enumerate(states):
        restored.load_lane_state(lane, state)
    continued, _ = play(restored, 20, first=17)
    restored.close()
    assert same(continued, expected)


def test_restore_of_unrepeatable_submission_warns(tmp_path):
    (tmp_path / "submission.py").write_text(
        "import os\ndef my_controller(*args):\n"
        "    direction = os.urandom(1)[0] % 4\n    return [[int(direction == one) for one in range(4)]]\n"
    )
    env = games_against([tmp_path / "submission.py"], count=2, lanes=1)
    play(env, 10)
    env.load_lane_state(0, env.lane_state(0))
    with pytest.warns(UserWarning, match="decisions of game 0 of environment 1 differ when the game is replayed"):
        play(env, 1, first=10)
    env.close()


def test_restore_of_moves_of_another_game_raises(tmp_path):
    (tmp_path / "submission.py").write_text(UP)
    env = games_against([tmp_path / "submission.py"], count=2, lanes=1)
    play(env, 5)
    state = env.lane_state(0)
    state["moves"][1, :5] = (state["moves"][1, :5] + 1) % 4
    env.load_lane_state(0, state)
    with pytest.raises(ConfigError, match="the saved moves do not lead to the saved game"):
        play(env, 1, first=5)
    state["moves"][:] = 9
    with pytest.raises(ValueError, match="not in a valid state"):
        env.load_lane_state(0, state)
    env.close()


def test_several_submissions_take_turns_on_both_sides(tmp_path):
    files = [write_chaser(tmp_path / name) for name in ("one", "other")]
    env = games_against(files, count=2, lanes=1, submission_fraction=1.0)
    played = []
    for episode in range(8):
        env.games.episode[:] = episode
        played += [(env._submissions._file(row).parent.name, (row + episode) % 2) for row in range(2)]
    assert Counter(played) == dict.fromkeys(product(("one", "other"), (0, 1)), 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"control_both_teams": False}, "control_both_teams is false"),
        ({"submission_fraction": 1.5}, "submission_fraction is 1.5"),
        ({"submission_timeout": 0.0}, "submission_timeout 0.0"),
    ],
)
def test_invalid_submission_settings_are_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        TeamSnakesConfig(**({"control_both_teams": True, "submissions": ("a.py",)} | settings))


def test_submission_paths_become_absolute_and_must_exist(tmp_path, monkeypatch):
    (tmp_path / "submission.py").write_text(UP)
    monkeypatch.chdir(tmp_path)
    config = TeamSnakesConfig(control_both_teams=True, submissions=("submission.py",)).with_absolute_paths()
    assert config.submissions == (str(tmp_path.resolve() / "submission.py"),)
    with pytest.raises(ConfigError, match=r"there is no file none\.py"):
        TeamSnakesConfig(control_both_teams=True, submissions=("none.py",)).with_absolute_paths()


def test_submission_fraction_of_no_environment_raises_in_training(tmp_path):
    env = games_against([write_chaser(tmp_path)], submission_fraction=0.1)
    with pytest.raises(ConfigError, match=r"submission_fraction is 0\.1, which is none of the 4 environments"):
        env.on_iteration_start(CLOCK)


@pytest.mark.parametrize(("place", "words"), [("{run}/evil.py", "is a file inside it"), ("evil.py", "not an absolute")])
def test_run_directory_executes_no_submission_inside_it(tmp_path, place, words):
    run = tmp_path / "run"
    run.mkdir()
    (run / "evil.py").write_text(UP)
    task = {"control_both_teams": True, "submissions": [place.format(run=run)]}
    config = {"format": FORMAT, "recipe": "team-ddpg", "task": task, "algo": {}, "run": {}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=f"the submission of .* {words}"):
        load_recipe(run)
