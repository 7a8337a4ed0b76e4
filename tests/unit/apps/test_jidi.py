"""Jidi submission: standalone, equal to the policy; replays have the viewer's format."""

import ast
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import vermin

from helpers.python37 import python37
from helpers.team_games import arrange
from lockstep.apps.jidi.controller import HeadingTracker, TeamController, read_game
from lockstep.apps.jidi.platform import play_game
from lockstep.apps.jidi.submission import network_of, submission_text
from lockstep.apps.jidi.verification import verify
from lockstep.cli import main
from lockstep.config import ConfigError, apply_overrides
from lockstep.inference import load
from lockstep.lanes import Lanes
from lockstep.pytree import tree_map
from lockstep.tasks.team_snakes.features import ON_BOARD
from lockstep.tasks.team_snakes.opponents import CAUTIOUS, GREEDY, RANDOM
from lockstep.tasks.team_snakes.platform_observations import NAMES, observation_of
from lockstep.tasks.team_snakes.rules import DOWN, FIRST, RIGHT, SNAKES, START_LENGTH, TEAM, UP, WIDTH

# Process without lockstep and torch: it answers with the submission alone.
ALONE = """
import json, sys
for name in ("torch", "numba", "lockstep", "gymnasium"):
    sys.modules[name] = None
import importlib.util
answers = []
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("submission", path)
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
    """Two teams: one egocentric, one with board features and both teams observed.

    Their weights are random and large, so that their actions depend on every feature.
    """
    ahead = train(tmp_path_factory.mktemp("ahead"), "--run.seed", "5", "--preset", "scripts")
    board = train(tmp_path_factory.mktemp("board"), "--task.observation", "features")
    generator = torch.Generator().manual_seed(0)
    for policy in (ahead, board):
        for parameter in policy.policy.actor.parameters():
            parameter.data.normal_(generator=generator)
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
        yield env.games, actions, turned
        env.step(env.scripted_actions(CAUTIOUS))


def test_controller_chooses_the_same_actions_as_policy(policies):
    for policy in policies:
        controllers, compared, returned = [TeamController(network_of(policy)) for _ in range(8)], 0, 0
        for games, actions, turned in watch(policy):
            for number, game in enumerate(games):
                first = (game.place + game.episode) % 2 * TEAM
                # A snake that returned across an edge of the board: one observation alone does not tell its heading.
                alone = read_game(observation_of(game, first, None), HeadingTracker())
                returned += int((alone.heading != game.heading).sum())
                for agent in range(TEAM):
                    snake = first + agent
                    facing = game.heading[snake] if turned else 0
                    direction = controllers[number].choose_direction(observation_of(game, snake, None))
                    assert direction == ON_BOARD[facing, actions[number, agent]]
                    compared += 1
                controllers[number].tracker.moves.clear()  # a script moves these snakes
        assert compared == 120 * 8 * TEAM
        assert returned > 0


@pytest.mark.parametrize(("move", "heading"), [(UP, UP), (RIGHT, DOWN), (None, UP)])
def test_own_snake_that_returns_to_where_it_could_have_moved_has_its_true_heading(move, heading):
    # Alive, it moved up across the edge. It may also have died on the right, and returned to the same cells: the rules
    # then let it face down, because they ignore the torus there. Only its own last move tells the two apart.
    others = [[100 + 20 * row, 101 + 20 * row, 102 + 20 * row] for row in range(SNAKES - 1)]
    tracker, corner = HeadingTracker(), 9 * WIDTH
    tracker.update([[0, 19, 18], *others])
    if move is not None:
        tracker.moves[0] = move
    moved = [[body[0] - 1, *body[:2]] for body in others]
    assert tracker.update([[corner, 0, 19], *moved])[0] == heading


def test_read_game_parses_platform_observation():
    game = arrange({0: [(0, 0), (0, 19), (9, 19)], 4: [(0, 5), (9, 5), (8, 5), (8, 6)]}, beans=[(3, 3)])[0]
    read = read_game(observation_of(game, 2, ["up"] * 6), HeadingTracker())
    assert np.array_equal(read.owner, game.owner)
    assert np.array_equal(read.heading, game.heading)  # across the seam
    assert np.array_equal(read.length, game.length)
    assert np.array_equal(read.beans, game.beans)
    with pytest.raises(ValueError, match="10 x 20 cells"):
        read_game(observation_of(game, 2, None) | {"board_width": 10}, HeadingTracker())


def test_snake_that_returns_where_its_neck_was_has_the_heading_of_the_rules():
    # Its new neck and tail are where its head and neck were, as if it had moved up, across the edge.
    others = [[20 * snake + 103, 20 * snake + 102, 20 * snake + 101] for snake in range(SNAKES - 1)]
    before = [0, 19, 199, 198]
    tracker = HeadingTracker()
    tracker.update([before, *others])
    moved = [[body[0] + 1, *body[:-1]] for body in others]
    assert tracker.update([[180, 0, 19], *moved])[0] == DOWN  # shorter: it has died
    tracker.update([before, *others])
    assert tracker.update([[180, 0, 19, 199], *moved])[0] == UP


def test_submissions_run_standalone_and_independently(policies, tmp_path):
    names = ["one.py", "other.py"]
    for policy, name in zip(policies, names, strict=True):
        (tmp_path / name).write_text(submission_text(network_of(policy)))
    asked, expected = [], [[], []]
    controllers = [TeamController(network_of(policy)) for policy in policies]
    for step, (games, _, _) in enumerate(watch(policies[0], steps=60, count=2)):
        if step % 10 == 0:
            for snake in range(SNAKES):
                asked.append(observation_of(games[0], snake, ["up"] * SNAKES))
                for answers, controller in zip(expected, controllers, strict=True):
                    answers.append(controller.choose(asked[-1]))
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *names], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    assert expected[0] != expected[1]


def test_submission_needs_at_most_python_37(policies):
    text = submission_text(network_of(policies[0]))
    _, version = vermin.detect(text)
    assert version == (3, 7), vermin.version_strings([version])
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(node) for node in imported} == {
        "from __future__ import annotations",
        "import base64",
        "import numpy as np",
    }
    assert "njit" not in text  # nothing is compiled
    assert "random_below" not in text  # a controller draws no random numbers


def test_vermin_detects_newer_python_in_a_submission(policies):
    text = submission_text(network_of(policies[0]))
    newer = text.replace("last = len(self.weights) - 1", "last = len(list(zip(self.weights, strict=True))) - 1")
    assert newer != text
    assert vermin.detect(newer)[1] == (3, 10)


@pytest.mark.parametrize("python", ["own", "3.7"])
@pytest.mark.distributed
def test_submission_equals_policy_in_whole_games(policies, tmp_path, python):
    interpreter = python37() if python == "3.7" else sys.executable
    for policy, name in zip(policies, ("one.py", "other.py"), strict=True):
        (tmp_path / name).write_text(submission_text(network_of(policy)))
        assert verify(policy, tmp_path / name, games=2, python=interpreter) == 2 * 200 * TEAM


@pytest.mark.slow
def test_submission_equals_policy_in_20_games_on_python_37(policies, tmp_path):
    for policy, name in zip(policies, ("one.py", "other.py"), strict=True):
        (tmp_path / name).write_text(submission_text(network_of(policy)))
        assert verify(policy, tmp_path / name, games=20, python=python37()) == 20 * 200 * TEAM


def test_verify_other_network_names_game_and_step(policies, tmp_path):
    network = network_of(policies[0])
    network.biases[-1] = network.biases[-1] + np.float32([0.0, 0.0, 1000.0, 0.0])
    (tmp_path / "other.py").write_text(submission_text(network))
    with pytest.raises(ConfigError, match=r"game 0, step \d+: the submission moves .* but the policy moves"):
        verify(policies[0], tmp_path / "other.py", games=1)


def test_verify_other_features_are_detected(policies, tmp_path):
    text = submission_text(network_of(policies[0]))
    other = text.replace("out[index + 3] = 1.0 - nearest_bean(game, cell, 0, True)[1] / MAX_DISTANCE", "")
    assert other != text
    (tmp_path / "other.py").write_text(other)
    with pytest.raises(ConfigError, match="the submission moves"):
        verify(policies[0], tmp_path / "other.py", games=4)


def test_replay_has_viewer_format_and_consistent_scores(policies):
    team = TeamController(network_of(policies[0]))
    controllers = [lambda shown, space, continuous: team.choose(shown), GREEDY]
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
    assert "2,400 actions in 4 games: all equal" in capsys.readouterr().out
    assert (tmp_path / "submission.py").is_file()
    assert main(["export", directory, "--to", "jidi"]) == 2
    assert "submission.py exists" in capsys.readouterr().err
    monkeypatch.setattr("lockstep.cli.export.VERIFIED_GAMES", 1)
    assert main(["export", directory, "--to", "jidi", "--out", "team"]) == 0
    assert [path.name for path in (tmp_path / "team").iterdir()] == ["submission.py"]
    assert main(["play", directory, "--replay", "game.json"]) == 0
    assert json.loads((tmp_path / "game.json").read_text())["names"] == ["lockstep", "level 2"]


def test_network_of_grid_observation_raises(policies):
    policy = policies[0]
    grid = apply_overrides(policy.recipe, {"task.observation": "grid"})
    with pytest.raises(ConfigError, match="observes a grid"):
        network_of(type(policy)(policy.policy, grid, policy.device))
