"""Jidi submission: standalone, equal to the policy; replays have the viewer's format."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers.team_games import arrange
from lockstep.apps.jidi.controller import choose_direction, read_game
from lockstep.apps.jidi.platform import NAMES, observation_of, play_game
from lockstep.apps.jidi.submission import network_of, write_submission
from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.inference import load
from lockstep.lanes import Lanes
from lockstep.pytree import tree_map
from lockstep.tasks.team_snakes.features import ON_BOARD
from lockstep.tasks.team_snakes.opponents import CAUTIOUS, GREEDY, RANDOM
from lockstep.tasks.team_snakes.rules import FIRST, SNAKES, START_LENGTH, TEAM, WIDTH

# Process without lockstep and torch: it answers with the submission alone.
ALONE = """
import json, sys
for name in ("torch", "numba", "lockstep", "gymnasium"):
    sys.modules[name] = None
import importlib.util
answers = []
for directory in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("submission", directory + "/submission.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    asked = json.load(open("asked.json"))
    asked = [{int(key) if key.isdigit() else key: value for key, value in one.items()} for one in asked]
    answers.append([module.my_controller(one, [None], False) for one in asked])
print(json.dumps(answers))
"""


def train(directory, *words):
    assert main(["train", "team-ddpg", "--smoke", "--run.runs-dir", str(directory), *words]) == 0
    return load(next(directory.iterdir()))


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two barely trained teams: one egocentric, one with board features and both teams observed."""
    ahead = train(tmp_path_factory.mktemp("ahead"), "--run.seed", "5", "--preset", "scripts")
    board = train(tmp_path_factory.mktemp("board"), "--task.observation", "features")
    return [ahead, board]


def watch(policy, steps=120, count=8):
    """Play games; for each step yield the games, the policy's actions, and whether they are egocentric."""
    config = apply_overrides(
        policy.recipe, {"task.num_envs": count, "task.control_both_teams": False, "task.max_episode_steps": 200}
    ).task
    env = config.build(Lanes(1, range(1), 3), torch.device("cpu"))
    turned, both = config.observation == "egocentric", policy.recipe.task.control_both_teams
    for _ in range(steps):
        obs = env.observations()
        policy.reset()
        seen = tree_map(lambda x: torch.cat([x, x], dim=1), obs) if both else obs
        actions = torch.from_numpy(policy.act(seen))[:, :TEAM]
        yield env._games, actions, turned
        env.step(env.scripted_actions(CAUTIOUS))


def test_controller_chooses_the_same_actions_as_policy(policies):
    for policy in policies:
        network, compared, odd = network_of(policy), 0, 0
        for games, actions, turned in watch(policy):
            for number, game in enumerate(games):
                first = (game.place + game.episode) % 2 * TEAM
                for agent in range(TEAM):
                    snake = first + agent
                    shown = observation_of(game, snake, None)
                    if (read_game(shown).heading != game.heading).any():
                        odd += 1  # respawned across a seam, where the platform derives another heading
                        continue
                    facing = game.heading[snake] if turned else 0
                    assert choose_direction(network, shown) == ON_BOARD[facing, actions[number, agent]]
                    compared += 1
        assert compared > 2500
        assert odd < 0.02 * compared


def test_read_game_parses_platform_observation():
    game = arrange({0: [(0, 0), (0, 19), (9, 19)], 4: [(0, 5), (9, 5), (8, 5), (8, 6)]}, beans=[(3, 3)])[0]
    read = read_game(observation_of(game, 2, ["up"] * 6))
    assert np.array_equal(read.owner, game.owner)
    assert np.array_equal(read.heading, game.heading)  # across the seam
    assert np.array_equal(read.length, game.length)
    assert np.array_equal(read.beans, game.beans)
    with pytest.raises(ValueError, match="10 x 20 cells"):
        read_game(observation_of(game, 2, None) | {"board_width": 10})


def test_submissions_run_standalone_and_independently(policies, tmp_path):
    names = ["one", "other"]
    for policy, name in zip(policies, names, strict=True):
        write_submission(policy, tmp_path / name)
    asked, expected = [], [[], []]
    for step, (games, _, _) in enumerate(watch(policies[0], steps=60, count=2)):
        if step % 10 == 0:
            for snake in range(SNAKES):
                asked.append(observation_of(games[0], snake, ["up"] * SNAKES))
                for answers, policy in zip(expected, policies, strict=True):
                    direction = choose_direction(network_of(policy), asked[-1])
                    answers.append([[int(direction == way) for way in range(4)]])
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *names], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    assert expected[0] != expected[1]


def test_replay_has_viewer_format_and_consistent_scores(policies):
    network = network_of(policies[0])
    controllers = [lambda shown, space, continuous: one_hot(choose_direction(network, shown)), GREEDY]
    replay = json.loads(json.dumps(play_game(controllers, ["ours", "level 2"], key=7)))
    assert (replay["game_name"], replay["n_player"], replay["board_height"], replay["board_width"]) == (
        "snakes_3v3",
        SNAKES,
        10,
        20,
    )
    assert len(replay["steps"]) == 200
    last = replay["steps"][-1]["info_after"]
    assert replay["winner_information"] == last["score"] == replay["n_return"]
    assert replay["winner"] == FIRST + int(np.argmax(last["score"]))
    assert [len(body) - START_LENGTH for body in last["snakes_position"]] == last["score"]
    before = replay["init_info"]
    for step in replay["steps"]:
        assert step["info_before"]["directions"] != []
        assert set(step["info_before"]["directions"]) <= set(NAMES)
        after = step["info_after"]
        assert len(after["beans_position"]) == 5
        for snake in range(SNAKES):
            if not after["hit"][snake]:  # alive: it moved by one cell
                (row, column), (old_row, old_column) = (
                    after["snakes_position"][snake][0],
                    before["snakes_position"][snake][0],
                )
                assert ((row - old_row) % 10, (column - old_column) % WIDTH) in {(1, 0), (9, 0), (0, 1), (0, 19)}
        before = after
    assert sum(sum(step["info_after"]["hit"]) for step in replay["steps"]) > 0


def one_hot(direction):
    return [[int(direction == way) for way in range(4)]]


def test_play_game_calls_controllers_like_the_platform():
    asked = []

    def controller(observation, action_space, is_act_continuous):
        asked.append(observation)
        return [[0, 0, 1, 0]]

    replay = play_game([RANDOM, controller], ["a", "b"], key=1, steps=3)
    assert [one["controlled_snake_index"] for one in asked] == [5, 6, 7] * 3
    assert asked[0]["last_direction"] is None
    assert asked[3]["last_direction"] == replay["init_info"]["directions"]  # one step behind, as on the platform
    assert asked[6]["last_direction"] == replay["steps"][1]["info_before"]["directions"]
    assert all(asked[0][number] for number in range(1, 8))


def test_export_jidi_and_play_replay_write_files(policies, tmp_path, capsys, monkeypatch):
    run = tmp_path / "runs"
    train(run)
    monkeypatch.chdir(tmp_path)
    directory = str(next(run.iterdir()))
    assert main(["export", directory, "--to", "jidi"]) == 0
    assert (tmp_path / "submission" / "submission.py").is_file()
    assert main(["export", directory, "--to", "jidi"]) == 2  # exists already
    assert "is not empty" in capsys.readouterr().err
    assert main(["play", directory, "--replay", "game.json"]) == 0
    assert json.loads((tmp_path / "game.json").read_text())["names"] == ["lockstep", "level 2"]


def test_network_of_grid_observation_raises(policies):
    policy = policies[0]
    grid = apply_overrides(policy.recipe, {"task.observation": "grid"})
    with pytest.raises(ConfigError, match="observes a grid"):
        network_of(type(policy)(policy.policy, grid, policy.device))
