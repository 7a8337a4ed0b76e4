"""Processes of submissions: observations, isolation of games, time limits and errors."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from helpers.python37 import python37
from helpers.submissions import UP
from helpers.team_games import build
from lockstep.config import ConfigError
from lockstep.tasks.team_snakes.platform_observations import observation_of
from lockstep.tasks.team_snakes.submission_process import SubmissionError, SubmissionProcess


@pytest.fixture
def process(tmp_path):
    """Start the process of a submission with this text; it is ended after the test."""
    started = []

    def start(text, timeout=20.0, python=sys.executable):
        (tmp_path / "submission.py").write_text(text)
        started.append(SubmissionProcess(tmp_path / "submission.py", timeout, python))
        return started[-1]

    yield start
    for one in started:
        one.close()


def observation(snake=0):
    return observation_of(build(1).games[0], snake, None)


def ask(process, step=0):
    process.ask(observation(), step)
    return process.direction()


def test_submission_gets_observation_of_the_platform(process):
    check = (
        "def my_controller(observation, action_space, is_act_continuous):\n"
        "    assert sorted(map(str, observation)) == sorted(['1', '2', '3', '4', '5', '6', '7', 'board_width',\n"
        "        'board_height', 'last_direction', 'controlled_snake_index']), observation\n"
        "    assert len(observation[1]) == 5 and len(observation[2]) == 3 and len(observation[2][0]) == 2\n"
        "    assert len(action_space) == 1 and action_space[0].n == 4 and not is_act_continuous\n"
        "    assert action_space[0].__class__.__name__ == 'Discrete' and action_space[0].sample() in range(4)\n"
        "    return [[0, 0, 1, 0]]\n"
    )
    player = process(check)
    player.start_game(1, "game 0")
    assert ask(player) == 2


def test_submission_is_not_imported_here_and_does_not_find_lockstep_by_path(process, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    text = "import os, sys\nassert not any('elsewhere' in path or path == '' for path in sys.path), sys.path\n"
    text += "assert not any('team_snakes' in path for path in sys.path)\n"
    player = process(text + UP + f"    assert os.getpid() != {os.getpid()}\n")
    player.start_game(1, "game 0")
    assert ask(player) == 0
    assert "submission" not in sys.modules


def test_submission_game_starts_with_fresh_module_and_seeded_random_numbers(process, tmp_path):
    (tmp_path / "neighbor.py").write_text("count = 0\n")
    text = (
        "import random\nimport numpy as np\nimport neighbor\n"
        "assert neighbor.count == 0\n"
        "moves = [random.randrange(4), int(np.random.randint(4)), hash('text') % 4]\n"
        "def my_controller(observation, action_space, is_act_continuous):\n"
        "    neighbor.count += 1\n"
        "    direction = moves[neighbor.count - 1] if neighbor.count <= 3 else random.randrange(4)\n"
        "    return [[int(direction == one) for one in range(4)]]\n"
    )
    player, games = process(text), []
    for seed in (1, 2, 1):
        player.start_game(seed, "game")
        games.append([ask(player, step) for step in range(30)])
    assert games[0] == games[2] != games[1]
    other = process(text)
    other.start_game(1, "game")
    assert [ask(other, step) for step in range(30)] == games[0]


def test_submission_prints_do_not_disturb_its_answers(process):
    player = process(
        "import sys, os\nos.write(1, b'text')\nprint('loaded')\n" + UP.replace("return", "print(1); return")
    )
    player.start_game(1, "game 0")
    assert [ask(player) for _ in range(3)] == [0, 0, 0]


def test_submission_too_slow_is_ended_with_file_game_and_step(process, tmp_path):
    slow = "import time\ncalls = []\n" + UP.replace(
        "return", "calls.append(1); time.sleep(len(calls) > 1 and 60); return"
    )
    player = process(slow, timeout=0.5)
    player.start_game(1, "game 7")
    ask(player)
    pid = player._process.pid
    group = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    with pytest.raises(SubmissionError, match=r"submission.py, game 7, step 3, gave no response within 0.5 s"):
        ask(player, step=3)
    assert not psutil.wait_procs(group, timeout=10)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "def my_controller(*args):\n    raise KeyError('bean')\n",
            r"step 5, ended with exit code 1\.[^$]*KeyError: 'bean'",
        ),
        ("import os\ndef my_controller(*args):\n    os.kill(os.getpid(), 9)\n", "step 5, was killed by SIGKILL"),
        ("import os\ndef my_controller(*args):\n    os._exit(3)\n", "step 5, ended with exit code 3"),
        ("def my_controller(*args):\n    return [[0, 0, 0, 0]]\n", r"step 5, answered \[\[0, 0, 0, 0\]\]"),
        ("def my_controller(*args):\n    return [[1, 0]]\n", r"step 5, answered \[\[1, 0\]\]"),
    ],
)
def test_submission_that_fails_is_reported_with_file_game_and_step(process, text, words):
    player = process(text)
    player.start_game(1, "game 2")
    with pytest.raises(SubmissionError, match=f"submission.py, game 2, {words}"):
        ask(player, step=5)


def test_submission_that_cannot_be_imported_is_reported(process):
    with pytest.raises(SubmissionError, match="No module named 'no_such_package'"):
        process("import no_such_package\n" + UP).start_game(1, "game 0")


def test_submission_without_a_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        SubmissionProcess(tmp_path / "none.py", 1.0)


def test_submission_process_ends_when_its_owner_is_killed(tmp_path):
    (tmp_path / "submission.py").write_text("import time\n" + UP.replace("return", "time.sleep(600); return"))
    owner = (
        "import sys, time\nfrom pathlib import Path\n"
        "from lockstep.tasks.team_snakes.submission_process import SubmissionProcess\n"
        "player = SubmissionProcess(Path(sys.argv[1]), 600)\nplayer.start_game(1, 'game')\n"
        "player.ask({'controlled_snake_index': 2}, 0)\nprint('asked', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner, str(tmp_path / "submission.py")], stdout=subprocess.PIPE
    ) as started:
        assert started.stdout.readline() == b"asked\n"
        children = psutil.Process(started.pid).children(recursive=True)
        assert len(children) == 2  # the process of the submission and its game
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert not psutil.wait_procs(children, timeout=20)[1]


@pytest.mark.distributed
def test_submission_runs_under_python_37(process):
    player = process("import sys\nassert sys.version_info[:2] == (3, 7)\n" + UP, python=python37())
    player.start_game(1, "game 0")
    assert ask(player) == 0
