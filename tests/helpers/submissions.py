"""Submissions of other authors, in the form of the competition platform, for tests."""

CHASER = '''"""Moves to the nearest bean, sometimes at random. It prints, counts calls and imports a neighbor."""
import random

import numpy as np
from chaser_settings import PERIOD

calls = 0


def my_controller(observation, action_space, is_act_continuous=False):
    global calls
    calls += 1
    print("thinking", calls)
    row, column = observation[observation["controlled_snake_index"]][0]
    down, right = min(((r - row, c - column) for r, c in observation[1]), key=lambda way: abs(way[0]) + abs(way[1]))
    direction = (1 if down > 0 else 0) if abs(down) > abs(right) else (3 if right > 0 else 2)
    if calls % PERIOD == 0:
        direction = (random.randrange(4) + np.random.randint(4)) % action_space[0].n
    return [[int(direction == one) for one in range(4)]]
'''
UP = "def my_controller(observation, action_space, is_act_continuous):\n    return [[1, 0, 0, 0]]\n"


def write_chaser(directory, period=5):
    """Write the file of a submission and the file that it imports; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "chaser_settings.py").write_text(f"PERIOD = {period}\n")
    (directory / "submission.py").write_text(CHASER)
    return directory / "submission.py"
