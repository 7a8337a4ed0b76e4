"""The torch backend of Snake matches the numba kernel and never synchronizes with its device.

Rules are tested in test_snake for both backends.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.clock import TrainState
from lockstep.lanes import Lanes
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.snake.board import BODY, COLUMN_STEP, FOOD, HEAD, ROW_STEP
from lockstep.tasks.snake.env import SnakeConfig

CPU = torch.device("cpu")


def build(backend, count, *, lanes=1, seed=0, device=CPU, **rules):
    config = SnakeConfig(num_envs=count, backend=backend, **rules)
    return config.build(Lanes(lanes, range(lanes), seed), device)


def greedy(obs):
    """Actions [B] towards the food among the safe ones, for observations [B, 3, G, G]."""
    count, _, size, _ = obs.shape
    blocked = np.pad(obs[:, BODY].numpy(), ((0, 0), (1, 1), (1, 1)), constant_values=1)
    head, food = (np.stack(np.divmod(obs[:, plane].flatten(1).argmax(1).numpy(), size)) for plane in (HEAD, FOOD))
    costs = []
    for row_step, column_step in zip(ROW_STEP, COLUMN_STEP, strict=True):
        row, column = head[0] + row_step, head[1] + column_step
        distance = np.abs(row - food[0]) + np.abs(column - food[1])
        costs.append(np.where(blocked[np.arange(count), row + 1, column + 1], 1000, distance))
    return np.argmin(costs, axis=0)


def cycle_player(size):
    """Player that follows a Hamiltonian cycle matching the start position on a 6 x 6 board."""
    turns = [[(row, column) for column in range(1, size)] for row in range(size)]
    winding = [place for row in range(size)[::-1] for place in turns[row][:: 1 if row % 2 else -1]]
    cycle = [(size - 1, 0), *winding, *[(row, 0) for row in range(size - 1)]]
    steps = list(zip(ROW_STEP, COLUMN_STEP, strict=True))
    action = np.empty(size * size, np.int64)
    for (row, column), after in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        action[row * size + column] = steps.index((after[0] - row, after[1] - column))
    return lambda obs: action[obs[:, HEAD].flatten(1).argmax(1).numpy()]


def assert_same_step(ours, theirs):
    """Compare all step outputs; return which episodes ended."""
    for name in ("obs", "reward", "terminated", "truncated"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other), name
    ended = ours.terminated | ours.truncated
    assert torch.equal(ours.final_obs[ended], theirs.final_obs[ended])
    for name in ("apples", "full"):
        assert ours.episode_info[name].dtype == theirs.episode_info[name].dtype
        assert torch.equal(ours.episode_info[name][ended], theirs.episode_info[name][ended]), name
    return ended


def assert_same_state(one, other, lanes=1):
    for lane in range(lanes):
        mine, theirs = one.lane_state(lane), other.lane_state(lane)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype, name
            assert torch.equal(mine[name], theirs[name]), name


@pytest.mark.parametrize("size", range(4, 13))
def test_torch_backend_matches_numba_in_ten_thousand_games(size):
    """1,112 games per size on nine sizes; half of the boards play randomly, half greedily with noise."""
    count, rng = 200, np.random.default_rng(size)
    hunger = size * size // 2  # some games truncate
    one, other = (
        build(backend, count, size=size, seed=size, max_steps_without_food=hunger) for backend in ("torch", "numba")
    )
    noise, seen = np.where(np.arange(count) % 2, 1.0, 0.02), torch.zeros(3)
    games, obs = 0, one.reset()
    assert torch.equal(obs, other.reset())
    while games < 1112:
        chosen = np.where(rng.random(count) < noise, rng.integers(4, size=count), greedy(obs))
        step = one.step(torch.from_numpy(chosen))
        ended = assert_same_step(step, other.step(torch.from_numpy(chosen)))
        games, obs = games + int(ended.sum()), step.obs
        reached = (step.terminated.any(), step.truncated.any(), (step.episode_info["apples"][ended] > size).any())
        seen += torch.tensor([float(kind) for kind in reached])
    assert_same_state(one, other)
    assert (seen > 0).all()  # deaths, truncations and long snakes


def test_torch_backend_matches_numba_on_filled_boards():
    one, other = (build(backend, 16, size=6) for backend in ("torch", "numba"))
    player, obs, wins = cycle_player(6), one.reset(), 0
    while wins < 32:  # includes the episodes after a win
        action = torch.from_numpy(player(obs))
        step = one.step(action)
        ended = assert_same_step(step, other.step(action))
        wins, obs = wins + int(step.episode_info["full"][ended].sum()), step.obs
    assert_same_state(one, other)


@pytest.mark.parametrize(("first", "second"), [("numba", "torch"), ("torch", "numba")])
def test_lane_state_of_one_backend_resumes_in_the_other(first, second):
    rng = np.random.default_rng(0)
    source, target = build(first, 16, lanes=8), build(second, 16, lanes=8, seed=1)
    for _ in range(100):
        source.step(torch.from_numpy(rng.integers(4, size=16)))
        target.step(torch.from_numpy(rng.integers(4, size=16)))
    for lane in range(8):
        target.load_lane_state(lane, source.lane_state(lane))
    assert_same_state(source, target, lanes=8)
    assert torch.equal(source.observations(), target.observations())
    for _ in range(200):
        action = torch.from_numpy(rng.integers(4, size=16))
        assert_same_step(source.step(action), target.step(action))
    assert_same_state(source, target, lanes=8)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["food"].fill_(int(state["body"][0, 0])),  # the plane still shows it elsewhere
        lambda state: state["length"].fill_(1),
        lambda state: state["length"].fill_(36),
        lambda state: state["front"].fill_(-1),
        lambda state: state["heading"].fill_(4),
        lambda state: state["body"].fill_(99),
        lambda state: state["planes"].zero_(),
    ],
)
def test_load_lane_state_invalid_board_raises_and_changes_nothing(backend, change):
    env = build(backend, 2, size=6)
    before, broken = env.lane_state(0), env.lane_state(0)
    change(broken)
    with pytest.raises(ValueError, match="are not in a valid state"):
        env.load_lane_state(0, broken)
    after = env.lane_state(0)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_load_lane_state_with_food_on_snake_raises(backend):
    env = build(backend, 1, size=6)
    state = env.lane_state(0)
    state["food"][0] = state["body"][0, 0]
    state["planes"][0, FOOD] = 0
    state["planes"][0, FOOD, state["food"][0]] = 1
    with pytest.raises(ValueError, match="are not in a valid state"):
        env.load_lane_state(0, state)


def test_check_env_finds_no_faults():
    assert check_env(SnakeConfig(backend="torch", size=6, max_steps_without_food=20), steps=120) == []


@pytest.mark.parametrize(
    "ask", [lambda env: env.on_iteration_start(TrainState(total_samples=1)), lambda env: env.lane_state(0)]
)
@pytest.mark.parametrize("action", [4, -1, 2**40])
def test_step_invalid_action_is_reported_at_next_synchronization(ask, action):
    env = build("torch", 4)
    env.on_iteration_start(TrainState(total_samples=1))
    env.step(torch.tensor([0, 1, action, 3]))  # does not synchronize, so the error is not detected yet
    with pytest.raises(ValueError, match=r"Give each of the 4 boards 0 \(left\)"):
        ask(env)
    env.on_iteration_start(TrainState(total_samples=1))  # reported once


@pytest.mark.parametrize("shape", [(3,), (4, 1)])
def test_step_wrong_action_shape_raises_immediately(shape):
    with pytest.raises(ValueError, match=r"Give each of the 4 boards 0 \(left\)"):
        build("torch", 4).step(torch.zeros(shape, dtype=torch.int64))


def test_step_any_truncated_is_always_true():
    env = build("torch", 4)
    assert env.step(torch.zeros(4, dtype=torch.int64)).any_truncated is True


def test_rendering_matches_numba_backend():
    one, other = (build(backend, 4, size=6) for backend in ("torch", "numba"))
    for action in np.random.default_rng(0).integers(4, size=(20, 4)):
        one.step(torch.from_numpy(action))
        other.step(torch.from_numpy(action))
        assert one.render_text(2) == other.render_text(2)
    assert np.array_equal(one.render(2), other.render(2))


# --------------------------------------------------------------------------------------------------------------- device

VIEWS = {"view", "unsqueeze", "squeeze", "slice", "select", "expand", "unbind", "_unsafe_view", "alias", "detach"}


class Operations(TorchDispatchMode):
    """Count device operations that are not views, and operations on host tensors."""

    count = host = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ not in VIEWS
        self.host += any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args)
        return function(*args, **kwargs or {})


def test_step_reads_no_value_on_host():
    """Meta tensors have no values, so any host read or data-dependent branch fails."""
    env = build("torch", 8, size=6, device=torch.device("meta"))
    action = torch.zeros(8, dtype=torch.int64, device="meta")
    with Operations() as operations:
        step = env.step(action)
    assert operations.host == 0
    assert operations.count <= 176  # 57, plus 119 of Philox, which Triton fuses into one launch
    assert step.obs.shape == step.final_obs.shape == (8, 3, 6, 6)
    with pytest.raises(RuntimeError, match="meta"):
        env.on_iteration_start(TrainState(total_samples=1))  # reads the error flag on the host


def test_step_updates_state_in_place():
    """CUDA graphs replay fixed addresses."""
    env = build("torch", 8)
    tensors = {name: x for name, x in vars(env).items() if isinstance(x, torch.Tensor)}
    places = {name: x.data_ptr() for name, x in tensors.items()}
    for action in np.random.default_rng(0).integers(4, size=(50, 8)):
        env.step(torch.from_numpy(action))
    assert {name: x.data_ptr() for name, x in vars(env).items() if isinstance(x, torch.Tensor)} == places
