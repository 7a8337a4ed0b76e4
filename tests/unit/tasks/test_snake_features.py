"""Features of Snake: equal to an independent search on dictionaries, and a function of the state alone."""

import math

import numpy as np
import pytest
import torch

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.snake.env import SnakeConfig
from lockstep.tasks.snake.features import FEATURES

CPU = torch.device("cpu")
STEPS = ((0, -1), (0, 1), (-1, 0), (1, 0))


def build(count=8, *, lanes=1, local=None, **settings):
    local = range(lanes) if local is None else local
    return SnakeConfig(num_envs=count, **{"observation": "features"} | settings).build(Lanes(lanes, local, 0), CPU)


def random_actions(steps, count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(4, size=(steps, count)))


def safe_actions(obs, step):
    """Choose an open direction with the most reachable cells, or at times the food."""
    by_direction = obs[:, :40].reshape(-1, 4, 10)
    wanted = by_direction[..., 6] + (by_direction[..., 8] if step % 3 else 0) + 10 * by_direction[..., 0]
    return wanted.argmax(dim=1)


def snake_of(env, number):
    """Return the cells of a snake from tail to head as (row, column), its food, heading and moves without food."""
    state, size = env.lane_state(0), env.config.size
    length, front = int(state["length"][number]), int(state["front"][number])
    body = state["body"][number].tolist()
    cells = [divmod(body[(front - length + 1 + i) % len(body)], size) for i in range(length)]
    return cells, divmod(int(state["food"][number]), size), int(state["heading"][number]), int(state["hungry"][number])


def neighbors(cell, size):
    for down, right in STEPS:
        place = (cell[0] + down, cell[1] + right)
        yield place if min(place) >= 0 and max(place) < size else None


def search_timed(start, freed, delay, size):
    arrival, wave = {start: 1}, [start]
    while wave:
        following = []
        for cell in wave:
            for other in neighbors(cell, size):
                late = other in freed and freed[other] + delay > arrival[cell] + 1
                if other is not None and other not in arrival and not late:
                    arrival[other] = arrival[cell] + 1
                    following.append(other)
        wave = following
    return arrival


def expected_features(cells, food, heading, hungry, size, max_steps):
    freed = {cell: moves for moves, cell in enumerate(cells, start=1)}
    head, tail, total, features = cells[-1], cells[0], size * size, []
    for start, (down, right) in zip(neighbors(head, size), STEPS, strict=True):
        if start is None or freed.get(start, 0) > 1:
            features += [0.0] * 10
            continue
        eats = start == food
        area, exits, waiting = {start}, [total], [start]
        while waiting:
            for other in neighbors(waiting.pop(), size):
                if other is None or other in area:
                    continue
                if other in freed:
                    exits.append(freed[other] + eats)
                else:
                    area.add(other)
                    waiting.append(other)
        arrival = search_timed(start, freed, eats, size)
        straight, place = 0, start
        while place is not None and place not in freed:
            straight += 1
            place = (place[0] + down, place[1] + right)
            place = place if min(place) >= 0 and max(place) < size else None
        closeness = [1 - min(arrival[cell] / (4 * size), 1) if cell in arrival else 0 for cell in (food, tail)]
        features += [1, eats, sum(moves == 2 for moves in arrival.values()) / 3, straight / size]
        features += [min(len(area) / max(total - len(cells), 1), 1), min(len(area) / min(exits), 1)]
        features += [len(arrival) / total, food in arrival, *closeness]
    features += [float(heading == direction) for direction in range(4)]
    features += [len(cells) / total, hungry / max_steps]
    features += [(place[axis] - head[axis]) / size for place in (food, tail) for axis in (0, 1)]
    features += [2 * axis / (size - 1) - 1 for axis in head] + [axis % 2 for axis in head] + [2 * len(cells) > total]
    for row in range(head[0] - 3, head[0] + 4):
        for column in range(head[1] - 3, head[1] + 4):
            inside = 0 <= row < size and 0 <= column < size
            features.append(freed.get((row, column), 0) / len(cells) if inside else 1.0)
    return torch.tensor(features, dtype=torch.float32)


@pytest.mark.parametrize("size", [6, 9])
def test_features_equal_an_independent_search(size):
    env, longest, seen = build(4, size=size), 0, []
    obs = env.reset()
    for step in range(400):
        obs = env.step(safe_actions(obs, step)).obs.clone()
        if step % 5 == 0:
            for number in range(4):
                board = snake_of(env, number)
                longest = max(longest, len(board[0]))
                wanted = expected_features(*board, size, 2 * size * size)
                torch.testing.assert_close(obs[number], wanted, atol=1e-6, rtol=0)
                seen.append(obs[number])
    assert longest > size * size / 3
    constant = 1 + (2 * longest <= size * size)  # the cell of the head, and whether the board is half full
    assert torch.stack(seen).std(dim=0).count_nonzero() == FEATURES - constant


def test_features_of_the_last_observation_are_those_before_the_new_episode():
    env, ends = build(16, size=6), 0
    before = env.reset().clone()
    for actions in random_actions(60, 16):
        step = env.step(actions)
        done = step.terminated
        # A collision moves nothing: all but the heading and the moves without food are as before.
        same = torch.ones(FEATURES, dtype=torch.bool)
        same[40:46] = False
        torch.testing.assert_close(step.final_obs[done][:, same], before[done][:, same])
        ends += int(done.sum())
        before = step.obs.clone()
    assert ends > 20
    assert before.abs().max() <= 1


def test_games_are_those_of_the_board_observation():
    features, board = build(8, size=6), build(8, size=6, observation="board")
    features.reset()
    board.reset()
    for actions in random_actions(200, 8):
        one, other = features.step(actions), board.step(actions)
        assert one.reward.equal(other.reward)
        assert one.terminated.equal(other.terminated)
    assert features.lane_state(0)["body"].equal(board.lane_state(0)["body"])


def test_restored_boards_show_the_same_features():
    env, restored = build(8, size=6), build(8, size=6)
    env.reset()
    restored.reset()
    for actions in random_actions(30, 8):
        obs = env.step(actions).obs
    restored.load_lane_state(0, env.lane_state(0))
    assert restored.observations().equal(obs)


def test_lane_does_not_depend_on_other_lanes():
    whole, part = build(8, size=6, lanes=4), build(8, size=6, lanes=4, local=range(2, 3))
    whole.reset()
    part.reset()
    for actions in random_actions(50, 8):
        assert whole.step(actions).obs[4:6].equal(part.step(actions[4:6]).obs)


def test_torch_backend_is_refused():
    with pytest.raises(ConfigError, match="torch backend"):
        build(backend="torch")


def test_full_board_has_finite_features():
    env = build(1, size=4)
    obs, finite = env.reset(), True
    for step in range(500):
        result = env.step(safe_actions(obs, step))
        finite &= all(math.isfinite(float(t.sum())) for t in (result.obs, result.final_obs))
        obs = result.obs.clone()
    assert finite
