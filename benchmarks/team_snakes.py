"""Steps per second of the compiled team games, on one core, with level 2 on both sides, by the number of games.

python benchmarks/team_snakes.py

First the rules and the scripts of both teams alone, then with what our three snakes see. A step moves all six snakes.
"""

import statistics
import time

import numpy as np
import torch
from numba import njit

from lockstep.lanes import Lanes
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.opponents import GREEDY, choose
from lockstep.tasks.team_snakes.rules import CELLS, SNAKES, TEAM, start, step


@njit
def play(games, steps, length, marks):
    """Both teams by script, with nothing around the rules."""
    moves, rewards, died = np.zeros(SNAKES, np.int64), np.zeros(SNAKES), np.zeros(SNAKES, np.bool_)
    for _ in range(steps):
        for b in range(games.size):
            choose(games[b], 0, GREEDY, False, marks, moves)
            choose(games[b], TEAM, GREEDY, False, marks, moves)
            if step(games[b], moves, rewards, died) or games[b].step == length:
                games[b].episode += 1
                start(games[b])


def median_speed(run, steps, rounds=9):
    run()  # compiles
    speeds = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        speeds.append(steps / (time.process_time() - began))
    return statistics.median(speeds)


def main(steps=50):
    marks = np.zeros((2, CELLS + 1), np.int64)
    for count in (64, 1024):
        names = {
            "features": {},
            "grid 10x20": {"observation": "grid"},
            "grid 7x7": {"observation": "grid", "grid_shape": (7, 7)},
        }
        tasks = {
            name: TeamSnakesConfig(num_envs=count, **settings).build(Lanes(8, range(8), 0), torch.device("cpu"))
            for name, settings in names.items()
        }
        games = tasks["features"].games.copy()
        bare = median_speed(lambda games=games: play(games, steps, 200, marks), steps * count)
        print(f"{count:>6,} games, rules and both scripts: {bare:>9,.0f} steps a CPU second")
        for name, task in tasks.items():
            seen = median_speed(
                lambda task=task: [task.step_numpy(task.scripted_actions(GREEDY).numpy()) for _ in range(steps)],
                steps * count,
            )
            print(f"{count:>6,} games, seen as {name:<18} {seen:>9,.0f} steps a CPU second")


if __name__ == "__main__":
    main()
