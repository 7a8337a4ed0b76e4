"""Measure the baselines of the learning curves: random actions and simple scripts, in 100 episodes each.

    python benchmarks/baselines.py snake gym-ppo trading
    python benchmarks/baselines.py cricket --data t20s_male_json.zip
    python benchmarks/baselines.py --env Hopper-v4 CartPole-v1

`benchmarks/curves.py` plots these numbers as dashed lines. `--env` measures random actions on Gymnasium environments,
which have the normalized score 0 in the suites of `lockstep benchmark`.
"""

import argparse

import numpy as np
import torch

import lockstep

EPISODES = 100


def play(recipe, choose, metric="return", **settings):
    """Return the mean over the first episode of each environment. `choose` maps environments to actions."""
    env = lockstep.make(recipe, num_envs=EPISODES, **settings)
    env.action_space.seed(0)
    playing, values = torch.ones(EPISODES, dtype=torch.bool), torch.zeros(EPISODES)
    while playing.any():
        step = env.step(choose(env))
        if metric == "return":
            values += step.reward * playing
        ended = playing & (step.terminated | step.truncated)
        if metric != "return":
            values = torch.where(ended, step.episode_info[metric], values)
        playing &= ~ended
    return float(values.mean())


def random_actions(env):
    return torch.as_tensor(np.stack([env.action_space.sample() for _ in range(EPISODES)]))


def greedy_actions(env):
    """Move each snake toward the food if that is safe, else to any safe cell."""
    from lockstep.tasks.snake.board import BODY, COLUMN_STEP, FOOD, HEAD, ROW_STEP

    actions = []
    for board in env.observations().numpy():
        size = board.shape[1]
        (row, column), (food_row, food_column) = np.argwhere(board[HEAD])[0], np.argwhere(board[FOOD])[0]
        distances = {}
        for action in range(4):
            y, x = row + ROW_STEP[action], column + COLUMN_STEP[action]
            if 0 <= y < size and 0 <= x < size and not board[BODY, y, x]:
                distances[action] = abs(y - food_row) + abs(x - food_column)
        actions.append(min(distances, key=distances.get, default=0))
    return torch.tensor(actions)


def buy_and_hold(env):
    return torch.full((EPISODES,), env.action_space.n - 1)  # the largest long position


def level_2_against_itself():
    from lockstep.apps.league.matches import play_match, script

    return play_match(script(2), script(2), games=10 * EPISODES, seed=0).win_rate


def linear_regression(data):
    """Return the validation MAE of least squares on the features, fitted on every delivery of the training matches."""
    from cricket import linear, targets  # benchmarks/cricket.py

    from lockstep.tasks.cricket.dataset import CricketConfig

    task = CricketConfig(data=data, train_stride=1).build(None, None)
    rows = task.examples["validation"]
    return float(np.abs(linear(task, task.examples["train"], rows) - targets(task, rows)).mean())


BASELINES = {
    "snake": {"greedy script": lambda data: play("snake-ppo", greedy_actions, "apples")},
    "snake-tiny": {"greedy script": lambda data: play("snake-ppo", greedy_actions, "apples", size=6)},
    "gym-ppo": {"random actions": lambda data: play("gym-ppo", random_actions)},
    "gym-ppo-lstm": {"random actions": lambda data: play("gym-ppo-lstm", random_actions)},
    "gym-sac": {"random actions": lambda data: play("gym-sac", random_actions)},
    "gym-ddpg": {"random actions": lambda data: play("gym-ddpg", random_actions)},
    "team-snakes": {"level 2 against itself": lambda data: level_2_against_itself()},
    "trading": {"buy and hold": lambda data: play("trading-lstm", buy_and_hold)},
    "cricket": {"linear regression": linear_regression},
    "tdmpc2": {"random actions": lambda data: play("dmc-tdmpc2", random_actions, tasks=("cartpole-swingup",))},
    "tdmpc2-cup-catch": {"random actions": lambda data: play("dmc-tdmpc2", random_actions, tasks=("cup-catch",))},
    "tdmpc2-walker-walk": {"random actions": lambda data: play("dmc-tdmpc2", random_actions, tasks=("walker-walk",))},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BASELINES))
    parser.add_argument("--env", nargs="+", default=[], metavar="ID", help="ids of Gymnasium environments")
    parser.add_argument("--data", help="Cricsheet archive")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in BASELINES]:
        parser.error(f"{unknown[0]} is not one of {', '.join(BASELINES)}")
    for id in args.env:
        print(f"{id}: random actions {play('gym-ppo', random_actions, id=id):.4g}", flush=True)
    for name in args.names:
        for label, measure in BASELINES[name].items():
            print(f"{name}: {label} {measure(args.data):.4g}")


if __name__ == "__main__":
    main()
