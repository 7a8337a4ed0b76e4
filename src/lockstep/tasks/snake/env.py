"""Snake: many boards of the game, stepped together by one compiled kernel.

A board's food is a pure function of its key, its episode's number and its snake's length. An episode is therefore the
same in any batch, on any process and after any resume.

Shapes: E boards a lane, B local boards, G size, C = G x G cells; a cell's number is row x G + column.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numba import njit
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.config import ConfigError
from lockstep.lanes import Lanes
from lockstep.protocols import StateDict, Step
from lockstep.tasks.kernels import Buffers, random_below
from lockstep.tasks.snake.board import (
    BODY,
    COLUMN_STEP,
    FIELDS,
    FOOD,
    HEAD,
    RIGHT,
    ROW_STEP,
    START_LENGTH,
    SnakeRules,
    actions_error,
    as_frame,
    as_text,
    describe_end,
    is_valid,
    score,
)
from lockstep.tasks.snake.features import FEATURES, new_search_buffers, show_features
from lockstep.tasks.snake.torch_backend import TorchSnake


@dataclass(frozen=True, kw_only=True)
class SnakeConfig(VecEnv.Config):
    """Settings of Snake. Every number is for the whole run, not for one process."""

    size: int = 12
    """Cells along each side of the board."""
    num_envs: int = 64
    """Number of boards in the whole run, stepped in parallel."""
    max_steps_without_food: int | None = None
    """Steps without food before an episode is truncated. None: twice the number of cells."""
    food_reward: float = 1.0
    """Reward for eating, added to the reward of the step."""
    death_reward: float = -1.0
    """Reward for hitting a wall or the snake's own body, added to the reward of the step."""
    step_reward: float = -0.01
    """Reward for every step."""
    observation: Literal["board", "features"] = "board"
    """board: three planes of cells, for a CNN. features: a vector from searches of the board, for an MLP."""
    backend: Literal["numba", "torch"] = "numba"
    """Implementation; both give the same games. numba: compiled, on the CPU. torch: on the device, asynchronous."""

    def __post_init__(self) -> None:
        if self.size < 4:
            raise ConfigError(f"size is {self.size}, too small for a snake of {START_LENGTH}.", "Use 4 or more.")
        if self.max_steps_without_food is not None and self.max_steps_without_food < 1:
            raise ConfigError(
                f"max_steps_without_food is {self.max_steps_without_food}, which leaves no step to play.",
                "Use 1 or more, or none.",
            )
        if self.observation == "features" and self.backend == "torch":
            raise ConfigError("the torch backend has no observation=features.", "Use task.backend=numba.")

    @property
    def rules(self) -> SnakeRules:
        max_steps = 2 * self.size * self.size if self.max_steps_without_food is None else self.max_steps_without_food
        return SnakeRules(self.size, max_steps, self.food_reward, self.death_reward, self.step_reward)

    def build(self, lanes: Lanes, device: torch.device) -> VecEnv:
        if self.backend == "torch":
            return TorchSnake(self, lanes, device)
        return Snake(self, lanes, device)


BOARD = np.dtype([(name, np.int64) for name in FIELDS])
"""Scalars of one board. A record, because numba passes it as a bare pointer without reference counting."""

Board: TypeAlias = Any
"""A record of BOARD. numba knows its fields, mypy does not."""


class SnakeBoards(NamedTuple):
    """The whole state of the boards."""

    state: np.recarray
    """[B] BOARD."""
    body: np.ndarray
    """[B, C] int32: ring buffer of the cells that the snake occupies."""
    planes: np.ndarray
    """[B, 3, C] uint8: the cells of head, body and food, updated cell by cell."""
    features: np.ndarray
    """[B, F] float32: the features, or F = 0 if the planes are the observation."""


class SnakeResults(NamedTuple):
    """Outputs of a step besides the next observation. The last four are written only where an episode ended."""

    reward: np.ndarray
    """[B] float32."""
    terminated: np.ndarray
    """[B] bool."""
    truncated: np.ndarray
    """[B] bool."""
    final_planes: np.ndarray
    """[B, 3, C] uint8."""
    final_features: np.ndarray
    """[B, F] float32."""
    apples: np.ndarray
    """[B] float32: food eaten in the episode."""
    full: np.ndarray
    """[B] float32: 1 where the snake filled the board."""


@njit(cache=True, nogil=True)
def _drop_food(board: Board, planes: np.ndarray) -> None:
    """Place food on a uniformly random free cell."""
    free = planes.shape[1] - board.length
    skip = random_below(free, board.key, board.episode, board.length)
    cell = 0
    while planes[BODY, cell] or skip:
        skip -= 1 - planes[BODY, cell]
        cell += 1
    board.food = cell
    planes[FOOD, cell] = 1


@njit(cache=True, nogil=True)
def _start(board: Board, body: np.ndarray, planes: np.ndarray, size: int) -> None:
    """Start a new episode: a short snake in the middle, heading right."""
    planes[:] = 0
    middle = size // 2 * size + size // 2
    for slot in range(START_LENGTH):
        body[slot] = middle - (START_LENGTH - 1) + slot
        planes[BODY, body[slot]] = 1
    planes[HEAD, middle] = 1
    board.length, board.front, board.heading, board.hungry = START_LENGTH, START_LENGTH - 1, RIGHT, 0
    _drop_food(board, planes)


@njit(cache=True, nogil=True)
def _move(board: Board, body: np.ndarray, planes: np.ndarray, action: int, size: int) -> tuple[bool, bool]:
    """Apply one step of the rules to one board; return (ate, died). A dead snake stays where it was."""
    if action != board.heading ^ 1:  # a reverse is ignored: the snake continues straight
        board.heading = action
    head, tail = body[board.front], body[(board.front - board.length + 1) % body.size]
    row, column = head // size + ROW_STEP[board.heading], head % size + COLUMN_STEP[board.heading]
    if not (0 <= row < size and 0 <= column < size):
        return False, True
    cell = row * size + column
    if planes[BODY, cell] and cell != tail:  # the tail leaves its cell as the head arrives
        return False, True

    ate = cell == board.food
    if not ate:
        planes[BODY, tail] = 0  # first, because the head may move to this cell
    planes[HEAD, head] = 0
    planes[HEAD, cell] = planes[BODY, cell] = 1
    board.front = (board.front + 1) % body.size
    body[board.front] = cell
    board.hungry += 1
    if ate:
        board.hungry = 0
        board.length += 1
        planes[FOOD, cell] = 0
        if board.length < body.size:
            _drop_food(board, planes)
    return ate, False


@njit(cache=True, nogil=True)
def _start_all(boards: SnakeBoards, rules: SnakeRules) -> None:
    """Start the first episode of every board."""
    for b in range(boards.state.size):
        boards.state[b].episode = 0
        _start(boards.state[b], boards.body[b], boards.planes[b], rules.size)
    _show_all(boards, rules)


@njit(cache=True, nogil=True)
def _show_all(boards: SnakeBoards, rules: SnakeRules) -> None:
    """Write the features of every board, if they are the observation."""
    if boards.features.shape[1] == 0:
        return
    buffers = new_search_buffers(boards.body.shape[1])
    for b in range(boards.state.size):
        max_steps = rules.max_steps_without_food
        show_features(boards.state[b], boards.body[b], rules.size, max_steps, buffers, boards.features[b])


@njit(cache=True, nogil=True)
def _step_all(boards: SnakeBoards, actions: np.ndarray, results: SnakeResults, rules: SnakeRules) -> int:
    """Step every board and start new episodes where one ended. Return the truncated count, or -1 for a bad action."""
    for b in range(actions.size):
        if not 0 <= actions[b] <= 3:
            return -1
    num_truncated, with_features = 0, boards.features.shape[1] > 0
    buffers = new_search_buffers(boards.body.shape[1])
    for b in range(actions.size):
        board, body, planes = boards.state[b], boards.body[b], boards.planes[b]
        ate, died = _move(board, body, planes, actions[b], rules.size)
        full = board.length == body.size
        terminated = died or full
        truncated = not terminated and board.hungry >= rules.max_steps_without_food
        results.reward[b] = rules.step_reward + ate * rules.food_reward + died * rules.death_reward
        results.terminated[b] = terminated
        results.truncated[b] = truncated
        if terminated or truncated:
            results.final_planes[b] = planes
            if with_features:
                show_features(board, body, rules.size, rules.max_steps_without_food, buffers, results.final_features[b])
            results.apples[b] = board.length - START_LENGTH
            results.full[b] = full
            board.episode += 1
            _start(board, body, planes, rules.size)
            num_truncated += truncated
        if with_features:
            show_features(board, body, rules.size, rules.max_steps_without_food, buffers, boards.features[b])
    return num_truncated


class Snake(VecEnv):
    """The boards of the local lanes. Actions are left, right, up, down; filling the board wins."""

    Config = SnakeConfig

    def setup(self) -> None:
        size, count, with_features = self.config.size, self.num_envs, self.config.observation == "features"
        self.action_space = Discrete(4)
        shape = (FEATURES,) if with_features else (3, size, size)
        if with_features:
            self.observation_space, dtype = Box(-1, 1, shape, np.float32), torch.float32
        else:
            self.observation_space, dtype = Box(0, 1, shape, np.uint8), torch.uint8
        self._rules = self.config.rules
        self._buffers = Buffers(
            self.device,
            obs=(dtype, (count, *shape)),
            reward=(torch.float32, (count,)),
            terminated=(torch.bool, (count,)),
            truncated=(torch.bool, (count,)),
            final_obs=(dtype, (count, *shape)),
            apples=(torch.float32, (count,)),
            full=(torch.float32, (count,)),
        )
        obs, reward, terminated, truncated, final_obs, apples, full = self._buffers.arrays.values()
        if with_features:
            planes, final_planes = np.zeros((2, count, 3, size * size), np.uint8)
            features, final_features = obs, final_obs
        else:
            planes, final_planes = obs.reshape(count, 3, -1), final_obs.reshape(count, 3, -1)
            features, final_features = np.zeros((2, count, 0), np.float32)
        self._results = SnakeResults(reward, terminated, truncated, final_planes, final_features, apples, full)
        self._boards = SnakeBoards(
            state=np.zeros(count, BOARD).view(np.recarray),
            body=np.zeros((count, size * size), np.int32),
            planes=planes,
            features=features,
        )
        self._boards.state.key = [stream.draw_seed(0) for stream in self.env_streams("snake")]
        fields = {name: self._boards.state[name] for name in FIELDS}
        for name, values in (fields | {"body": self._boards.body, "planes": self._boards.planes}).items():
            self.register_state(name, values)

    def reset(self) -> Tensor:
        _start_all(self._boards, self._rules)
        return self._buffers.copy_to_device()["obs"]

    def observations(self) -> Tensor:
        return self._buffers.tensors["obs"]

    def step(self, action: Tensor) -> Step:
        actions = action.to("cpu", torch.int64).contiguous().numpy()
        num_truncated = self.step_numpy(actions) if actions.shape == (self.num_envs,) else -1
        if num_truncated < 0:
            problem = f"the actions have shape {actions.shape} and run from {actions.min()} to {actions.max()}"
            raise actions_error(problem, self.num_envs)
        out = {**self._buffers.copy_to_device()}
        episode_info = {name: out.pop(name) for name in ("apples", "full")}
        return Step(**out, episode_info=episode_info, any_truncated=num_truncated > 0)

    def step_numpy(self, actions: np.ndarray) -> int:
        """Step the games alone, without tensors."""
        return _step_all(self._boards, actions, self._results, self._rules)

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        super().load_lane_state(lane, state)
        _show_all(self._boards, self._rules)
        self._buffers.copy_to_device()

    def is_valid_state(self, state: StateDict) -> bool:
        return is_valid({name: values.numpy() for name, values in state.items()})

    def render_text(self, env: int) -> str:
        return as_text(self._rules.size, self._boards.state[env], self._boards.body[env])

    def render(self, env: int) -> np.ndarray:
        return as_frame(self._rules.size, self._boards.state[env], self._boards.body[env])

    def render_title(self, env: int) -> str:
        return f"Snake {self._rules.size} x {self._rules.size}"

    def render_score(self, env: int) -> str:
        return score(self._rules.size, int(self._boards.state.length[env]))

    def render_result(self, info: Mapping[str, float]) -> str:
        return describe_end(info)
