"""Snake: rules, state consistency, and results that do not depend on lane placement.

Positions are (row, column). A snake is listed from tail to head.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.tasks.snake.board import BODY, COLUMN_STEP, DOWN, FOOD, HEAD, LEFT, RIGHT, ROW_STEP, UP
from lockstep.tasks.snake.env import SnakeConfig

CPU = torch.device("cpu")
SETTINGS = {}


@pytest.fixture(autouse=True, params=["numba", "torch"])
def backend(request, monkeypatch):
    monkeypatch.setitem(SETTINGS, "backend", request.param)
    return request.param


numba_only = pytest.mark.parametrize("backend", ["numba"], indirect=True)


def build(count=8, *, lanes=1, local=None, seed=0, **rules):
    local = range(lanes) if local is None else local
    return SnakeConfig(num_envs=count, **SETTINGS | rules).build(Lanes(lanes, local, seed), CPU)


def arrange(snake, apple, heading, *, size=6, hungry=0, **rules):
    """Build one board in a given state."""
    env = build(1, size=size, **rules)
    state = env.lane_state(0)
    cells = torch.tensor([row * size + column for row, column in snake])
    state["body"][0, : len(cells)] = cells
    numbers = {"length": len(cells), "front": len(cells) - 1, "heading": heading, "hungry": hungry}
    numbers["food"] = apple[0] * size + apple[1]
    for name, number in numbers.items():
        state[name][0] = number
    state["planes"].zero_()
    state["planes"][0, BODY, cells] = 1
    state["planes"][0, HEAD, cells[-1]] = 1
    state["planes"][0, FOOD, numbers["food"]] = 1
    env.load_lane_state(0, state)
    return env


def act(env, action):
    return env.step(torch.tensor([action]))


def act_all(env, action):
    return env.step(torch.full((env.num_envs,), action))


def places(plane):
    return [tuple(place) for place in plane.nonzero().tolist()]


def random_actions(steps, count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(4, size=(steps, count)))


def greedy(board):
    """Move towards the food if that is safe, else to any safe cell; `board` is one observation."""
    size = board.shape[1]
    (head,), (food,) = places(board[HEAD]), places(board[FOOD])
    choices = []
    for action in range(4):
        row, column = head[0] + ROW_STEP[action], head[1] + COLUMN_STEP[action]
        if 0 <= row < size and 0 <= column < size and not board[BODY, row, column]:
            choices.append((abs(row - food[0]) + abs(column - food[1]), action))
    return min(choices)[1] if choices else UP


def play_first_episodes(env, player):
    """Results of the first episode of every board: apples, full, terminated, truncated, [B] each."""
    obs, waiting = env.reset(), torch.ones(env.num_envs, dtype=torch.bool)
    outcome = torch.zeros(4, env.num_envs)
    while waiting.any():
        step = env.step(torch.tensor([player(board) for board in obs]))
        now = waiting & (step.terminated | step.truncated)
        results = [step.episode_info["apples"], step.episode_info["full"], step.terminated, step.truncated]
        outcome[:, now] = torch.stack([result.float() for result in results])[:, now]
        waiting &= ~now
        obs = step.obs
    return outcome


def record(env, actions):
    """Record all step outputs; mask the final observation and episode info where no episode ended."""
    seen = []
    for action in actions:
        step = env.step(action)
        ended = step.terminated | step.truncated
        seen.append(
            {
                "obs": step.obs.clone(),
                "reward": step.reward.clone(),
                "terminated": step.terminated.clone(),
                "truncated": step.truncated.clone(),
                "final_obs": step.final_obs * ended[:, None, None, None],
                "apples": step.episode_info["apples"] * ended,
                "full": step.episode_info["full"] * ended,
            }
        )
    return {name: torch.stack([step[name] for step in seen]) for name in seen[0]}  # [T, B, ...]


def assert_same(ours, theirs):
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# ---------------------------------------------------------------------------------------------------------------- rules


def test_reset_places_length_three_snake_at_center_heading_right():
    env = build(1, size=6)
    obs = env.reset()
    assert places(obs[0, BODY]) == [(3, 1), (3, 2), (3, 3)]
    assert places(obs[0, HEAD]) == [(3, 3)]
    assert len(places(obs[0, FOOD])) == 1
    assert places(act(env, LEFT).obs[0, HEAD]) == [(3, 4)]  # LEFT reverses RIGHT and is ignored


@pytest.mark.parametrize(
    ("action", "heading", "behind", "arrives"),
    [
        (LEFT, DOWN, (1, 2), (2, 1)),
        (RIGHT, DOWN, (1, 2), (2, 3)),
        (UP, RIGHT, (2, 1), (1, 2)),
        (DOWN, RIGHT, (2, 1), (3, 2)),
    ],
    ids=["left", "right", "up", "down"],
)
def test_step_action_is_absolute_board_direction(action, heading, behind, arrives):
    obs = act(arrange([behind, (2, 2)], apple=(5, 5), heading=heading), action).obs
    assert places(obs[0, HEAD]) == [arrives]
    assert set(places(obs[0, BODY])) == {(2, 2), arrives}


@pytest.mark.parametrize(
    ("heading", "reverse", "behind", "arrives"),
    [
        (LEFT, RIGHT, (2, 3), (2, 1)),
        (RIGHT, LEFT, (2, 1), (2, 3)),
        (UP, DOWN, (3, 2), (1, 2)),
        (DOWN, UP, (1, 2), (3, 2)),
    ],
    ids=["left", "right", "up", "down"],
)
def test_step_reverse_action_is_ignored(heading, reverse, behind, arrives):
    env = arrange([behind, (2, 2)], apple=(5, 5), heading=heading)
    step = act(env, reverse)
    assert places(step.obs[0, HEAD]) == [arrives]
    assert not step.terminated[0]
    assert env.lane_state(0)["heading"].tolist() == [heading]


@pytest.mark.parametrize(
    ("snake", "action"),
    [
        ([(0, 1), (0, 0)], LEFT),
        ([(5, 4), (5, 5)], RIGHT),
        ([(1, 2), (0, 2)], UP),
        ([(4, 2), (5, 2)], DOWN),
    ],
    ids=["left", "right", "up", "down"],
)
def test_step_into_wall_terminates(snake, action):
    step = act(arrange(snake, apple=(2, 2), heading=action), action)
    assert step.terminated[0]
    assert not step.truncated[0]
    assert step.reward[0].item() == pytest.approx(-1.01)
    assert set(places(step.final_obs[0, BODY])) == set(snake)


def test_step_into_own_body_terminates():
    snake = [(2, 1), (1, 1), (1, 2), (1, 3), (2, 3), (2, 2)]  # the cell above the head is part of the body
    step = act(arrange(snake, apple=(5, 5), heading=LEFT), UP)
    assert step.terminated[0]
    assert step.reward[0].item() == pytest.approx(-1.01)
    assert step.episode_info["full"][0] == 0


def test_step_into_cell_vacated_by_tail_is_allowed():
    env = arrange([(1, 1), (1, 2), (2, 2), (2, 1)], apple=(5, 5), heading=LEFT)
    for action in (UP, RIGHT, DOWN, LEFT) * 3:  # circle on four cells
        step = act(env, action)
        assert not step.terminated[0]
        assert set(places(step.obs[0, BODY])) == {(1, 1), (1, 2), (2, 2), (2, 1)}
    assert places(step.obs[0, HEAD]) == [(2, 1)]


def test_eating_grows_snake_and_places_new_food():
    env = arrange([(2, 0), (2, 1), (2, 2)], apple=(2, 3), heading=RIGHT, hungry=5)
    step = act(env, RIGHT)
    assert step.reward[0].item() == pytest.approx(0.99)
    assert places(step.obs[0, BODY]) == [(2, 0), (2, 1), (2, 2), (2, 3)]
    (food,) = places(step.obs[0, FOOD])
    assert food not in places(step.obs[0, BODY])
    assert env.lane_state(0)["hungry"].tolist() == [0]


def test_step_without_event_gives_step_reward():
    assert act(build(1, size=6), UP).reward[0].item() == pytest.approx(-0.01)


def test_rewards_match_configuration():
    rewards = {"food_reward": 5.0, "death_reward": -3.0, "step_reward": 0.5}
    assert act(arrange([(2, 1), (2, 2)], (2, 3), RIGHT, **rewards), RIGHT).reward[0] == 5.5
    assert act(arrange([(2, 4), (2, 5)], (0, 0), RIGHT, **rewards), RIGHT).reward[0] == -2.5
    assert act(arrange([(2, 1), (2, 2)], (0, 0), RIGHT, **rewards), RIGHT).reward[0] == 0.5


def test_eating_on_last_free_cell_terminates_as_full():
    rows = [[(row, column) for column in range(4)][:: -1 if row % 2 else 1] for row in range(4)]
    path = [place for row in rows for place in row]  # visits every cell of the board
    step = act(arrange(path[:-1], apple=path[-1], heading=LEFT, size=4), LEFT)
    assert step.terminated[0]
    assert not step.truncated[0]
    assert step.reward[0].item() == pytest.approx(0.99)
    assert step.episode_info["full"][0] == 1
    assert step.episode_info["apples"][0] == 16 - 3
    assert step.final_obs[0, BODY].all()
    assert not step.final_obs[0, FOOD].any()
    assert step.obs[0, BODY].sum() == 3  # the next episode has started


def test_step_limit_without_food_truncates_with_final_observation():
    env = arrange([(1, 1), (1, 2), (2, 2), (2, 1)], apple=(5, 5), heading=LEFT, max_steps_without_food=3)
    for action in (UP, RIGHT):
        assert not act(env, action).truncated[0]
    step = act(env, DOWN)
    assert step.truncated[0]
    assert not step.terminated[0]
    assert step.reward[0].item() == pytest.approx(-0.01)
    assert places(step.final_obs[0, HEAD]) == [(2, 2)]
    assert places(step.final_obs[0, FOOD]) == [(5, 5)]
    assert places(step.obs[0, HEAD]) == [(3, 3)]


def test_food_on_last_allowed_step_prevents_truncation():
    step = act(arrange([(2, 1), (2, 2)], apple=(2, 3), heading=RIGHT, hungry=9, max_steps_without_food=10), RIGHT)
    assert not step.truncated[0]


def test_wall_collision_at_step_limit_terminates_without_truncation():
    step = act(arrange([(2, 4), (2, 5)], apple=(0, 0), heading=RIGHT, hungry=10, max_steps_without_food=10), RIGHT)
    assert step.terminated[0]
    assert not step.truncated[0]


def test_max_steps_without_food_defaults_to_twice_the_cells():
    env = arrange([(1, 1), (1, 2), (2, 2), (2, 1)], apple=(5, 5), heading=LEFT, hungry=2 * 36 - 2)
    assert not act(env, UP).truncated[0]
    assert act(env, RIGHT).truncated[0]


# ------------------------------------------------------------------------------------------------------- random numbers


def test_food_position_is_uniform_over_free_cells():
    size, episodes = 5, 600
    env = build(64, size=size, max_steps_without_food=1)  # every step starts an episode
    counts = torch.zeros(size, size)
    for _ in range(episodes):
        counts += act_all(env, UP).obs[:, FOOD].sum(dim=0)
    free = env.reset()[0, BODY] == 0
    expected = 64 * episodes / free.sum()
    assert not counts[~free].any()
    assert ((counts[free] - expected) ** 2 / expected).sum() < 57  # 21 degrees of freedom: 99.997 %


def test_food_sequence_differs_by_board_seed_and_episode():
    def foods(seed):
        env = build(4, lanes=2, seed=seed, max_steps_without_food=1)
        return torch.stack([act_all(env, UP).obs[:, FOOD].clone() for _ in range(8)], dim=1)  # [B, episodes, G, G]

    games = [*foods(seed=0), *foods(seed=1)]
    assert len({tuple(places(game)) for game in games}) == 8
    assert all(len({tuple(places(food)) for food in game}) > 4 for game in games)


def test_food_of_next_episode_is_independent_of_previous_actions():
    def second_episode(actions):
        env = build(1, size=6)
        ended = [bool(act(env, action).terminated[0]) for action in actions]
        assert ended == [False] * (len(actions) - 1) + [True]
        return env.lane_state(0)["planes"]

    assert torch.equal(second_episode([RIGHT, RIGHT, RIGHT]), second_episode([UP, UP, UP, UP]))


def test_reset_replays_first_episodes():
    env, actions = build(8), random_actions(60, 8)
    first = record(env, actions)
    env.reset()
    assert_same(first, record(env, actions))


# ---------------------------------------------------------------------------------------------------- state consistency


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(4, 7), noise=st.floats(0, 0.3))
def test_state_planes_body_ring_and_food_stay_consistent(seed, size, noise):
    env, rng = build(4, size=size, seed=seed), np.random.default_rng(seed)
    obs = env.reset()
    for _ in range(60):
        actions = [int(rng.integers(4)) if rng.random() < noise else greedy(board) for board in obs]
        obs = env.step(torch.tensor(actions)).obs
        state = env.lane_state(0)
        for board in range(4):
            length, front = int(state["length"][board]), int(state["front"][board])
            ring = [int(state["body"][board, slot % size**2]) for slot in range(front - length + 1, front + 1)]
            body, food, head = obs[board].flatten(1)
            assert sorted(ring) == body.nonzero().flatten().tolist()  # no duplicate or missing cell
            assert [ring[-1]] == head.nonzero().flatten().tolist()
            assert [int(state["food"][board])] == food.nonzero().flatten().tolist()
            assert not (body & food).any()
            rows, columns = np.divmod(ring, size)
            assert (np.abs(np.diff(rows)) + np.abs(np.diff(columns)) == 1).all()  # consecutive cells are adjacent


def test_episode_info_apples_match_rewards():
    env, eaten = build(16, size=5), torch.zeros(16)
    obs, checked = env.reset(), 0
    for _ in range(150):
        step = env.step(torch.tensor([greedy(board) for board in obs]))
        eaten += step.reward > 0
        ended = step.terminated | step.truncated
        assert torch.equal(step.episode_info["apples"][ended], eaten[ended])
        eaten[ended] = 0
        obs, checked = step.obs, checked + int(ended.sum())
    assert checked > 16


def test_step_reuses_obs_buffer_and_matches_spaces(backend):
    env = build(8)
    obs, first = env.reset(), act_all(env, UP)
    second = act_all(env, LEFT)
    assert obs is first.obs is second.obs is env.observations()
    assert (first.reward is second.reward) is (backend == "numba")
    assert env.observation_space.contains(second.obs[0].numpy())
    assert env.action_space.n == 4
    assert second.reward.dtype == torch.float32
    assert second.terminated.dtype == second.truncated.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_step_accepts_any_integer_dtype_and_stride(dtype):
    actions = random_actions(40, 8).to(dtype)
    strided = torch.stack([actions, actions], dim=-1)[..., 0]
    assert_same(record(build(8), random_actions(40, 8)), record(build(8), strided))


@numba_only
@pytest.mark.parametrize("action", [[0, 1, 2, 4], [0, 1, 2, -1], [0, 1, 2], [[0], [1], [2], [3]]])
def test_step_invalid_actions_raise_value_error(action):
    with pytest.raises(ValueError, match=r"Give each of the 4 boards 0 \(left\)"):
        build(4).step(torch.tensor(action))


@numba_only
@pytest.mark.parametrize("hunger", [3, 6])
def test_step_any_truncated_matches_truncated(hunger):
    env, reported = build(4, size=5, max_steps_without_food=hunger), []
    for action in random_actions(3000, 4):
        step = env.step(action)
        assert step.any_truncated is bool(step.truncated.any())
        reported.append(step.any_truncated)
    assert 50 < sum(reported) < 2950  # both cases occurred


@numba_only
@pytest.mark.parametrize("action", [[0, 1, 2, 4], [-1, 1, 2, 3], [0, 1, 2]])
def test_step_invalid_actions_leave_state_unchanged(action):
    env, undisturbed = build(4), build(4)
    for move in random_actions(7, 4):
        env.step(move)
        undisturbed.step(move)
    with pytest.raises(ValueError, match="Give each of the 4 boards"):
        env.step(torch.tensor(action))
    assert_same(env.lane_state(0), undisturbed.lane_state(0))
    assert torch.equal(env.observations(), undisturbed.observations())
    assert_same(record(env, random_actions(20, 4, seed=1)), record(undisturbed, random_actions(20, 4, seed=1)))


# ---------------------------------------------------------------------------------------------------- lane independence


def test_step_results_do_not_depend_on_batch_size():
    actions = random_actions(200, 16)
    together = record(build(16), actions)
    assert together["terminated"].any()
    for count in (1, 3, 16):
        alone = record(build(count), actions[:, :count])
        assert_same(alone, {name: seen[:, :count] for name, seen in together.items()})


def test_step_results_do_not_depend_on_lane_count_or_placement():
    actions = random_actions(200, 16)
    everywhere = record(build(16, lanes=8), actions)
    hosted = []
    for local in (range(3), range(3, 6), range(6, 8)):
        mine = slice(2 * local.start, 2 * local.stop)
        hosted.append(record(build(16, lanes=8, local=local), actions[:, mine]))
    assert_same(everywhere, record(build(16, lanes=1), actions))
    assert_same(everywhere, {name: torch.cat([part[name] for part in hosted], dim=1) for name in everywhere})


def test_lane_state_mid_episode_resumes_identically_on_other_process():
    actions = random_actions(300, 16)
    whole = build(16, lanes=8)
    record(whole, actions[:150])
    saved = {lane: whole.lane_state(lane) for lane in range(8)}
    expected = record(whole, actions[150:])  # saved states must not alias the boards
    assert any(state["hungry"].any() for state in saved.values())

    for local in (range(3), range(3, 8)):
        part = build(16, lanes=8, local=local)
        record(part, random_actions(20, part.num_envs, seed=1))  # different state that loading must overwrite
        for lane in local:
            part.load_lane_state(lane, saved[lane])
        mine = slice(2 * local.start, 2 * local.stop)
        assert_same(record(part, actions[150:, mine]), {name: seen[:, mine] for name, seen in expected.items()})


def test_lane_state_save_load_round_trip_is_exact():
    env, other = build(16, lanes=8), build(16, lanes=8, seed=1)
    record(env, random_actions(50, 16))
    for lane in range(8):
        other.load_lane_state(lane, env.lane_state(lane))
        assert_same(env.lane_state(lane), other.lane_state(lane))
    assert torch.equal(env.observations(), other.observations())
    assert env.shared_state() == {}


def test_load_lane_state_of_other_board_size_raises():
    with pytest.raises(ValueError, match="Resume a run with the configuration it was started with"):
        build(8, size=8).load_lane_state(0, build(8, size=6).lane_state(0))


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("wrong", [{"size": 3}, {"max_steps_without_food": 0}])
def test_config_invalid_settings_raise(wrong):
    with pytest.raises(ConfigError, match="Use"):
        SnakeConfig(**wrong)


def test_num_envs_not_divisible_by_lanes_raises():
    with pytest.raises(ConfigError, match="num_envs is 10, which 8 lanes cannot share evenly"):
        build(10, lanes=8)


# ----------------------------------------------------------------------------------------------------- baseline players


def test_greedy_player_scores_reference_apples():
    apples, _, terminated, _ = play_first_episodes(build(200, size=6), greedy)
    assert 9 < apples.mean() < 15  # reference value: 12.1
    assert terminated.mean() > 0.9


def test_random_player_scores_reference_apples():
    rng = np.random.default_rng(0)
    apples, *_ = play_first_episodes(build(500, size=12), lambda board: int(rng.integers(4)))
    assert 0 < apples.mean() < 0.5  # reference value: 0.1


def test_hamiltonian_cycle_player_fills_board():
    size = 6
    turns = [[(row, column) for column in range(1, size)] for row in range(size)]
    winding = [place for row in range(size)[::-1] for place in turns[row][:: 1 if row % 2 else -1]]
    cycle = [(size - 1, 0), *winding, *[(row, 0) for row in range(size - 1)]]
    after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))

    def player(board):
        ((row, column),) = places(board[HEAD])
        step = np.subtract(after[row, column], (row, column)).tolist()
        return list(zip(ROW_STEP, COLUMN_STEP, strict=True)).index(tuple(step))

    apples, full, terminated, truncated = play_first_episodes(build(4, size=size), player)
    assert apples.tolist() == [33] * 4
    assert full.tolist() == terminated.tolist() == [1] * 4
    assert truncated.tolist() == [0] * 4


# ------------------------------------------------------------------------------------------------------------ rendering


def test_render_text_shows_board():
    assert arrange([(1, 0), (1, 1), (2, 1)], apple=(3, 3), heading=DOWN, size=4).render_text(0).splitlines() == [
        "+---------+",
        "| . . . . |",
        "| o o . . |",
        "| . @ . . |",
        "| . . . * |",
        "+---------+",
    ]


def test_render_uses_distinct_colors_for_head_body_food_floor():
    frame = arrange([(0, 0), (0, 1), (0, 2)], apple=(5, 5), heading=RIGHT).render(0)
    assert frame.dtype == np.uint8
    assert frame.shape == (6 * 24 + 24, 6 * 24 + 24, 3)
    middles = [(12 + 24 * row + 12, 12 + 24 * column + 12) for row, column in [(0, 1), (0, 2), (5, 5), (3, 3)]]
    body, head, food, floor = (frame[middle].astype(int) for middle in middles)
    assert body.argmax() == head.argmax() == 1  # green
    assert food.argmax() == 0  # red
    assert head.sum() > body.sum() > floor.sum()
