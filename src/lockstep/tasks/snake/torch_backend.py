"""Snake as batched torch operations: the same games as the numba kernel, cell by cell, on any device.

A step never synchronizes with the device: no value is read on the host, and no branch or shape depends on data. State
is updated in place, so that a CUDA graph can capture a step.

Shapes: E boards of a lane, B local boards, G size, C = G x G cells; a cell's number is row x G + column.
"""

from collections.abc import Mapping

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from lockstep.base import VecEnv
from lockstep.clock import TrainState
from lockstep.ops.philox.draws import integers_at
from lockstep.protocols import StateDict, Step
from lockstep.pytree import load_into
from lockstep.tasks.snake.board import (
    BODY,
    COLUMN_STEP,
    FIELDS,
    FOOD,
    HEAD,
    RIGHT,
    ROW_STEP,
    START_LENGTH,
    actions_error,
    as_frame,
    as_text,
    describe_end,
    is_valid,
    score,
)


class TorchSnake(VecEnv):
    """The boards of the local lanes. Actions are left, right, up, down; filling the board wins."""

    def setup(self) -> None:
        self._rules = rules = self.config.rules
        size, count, device = rules.size, self.num_envs, self.device
        self._cells = size * size
        self.observation_space, self.action_space = Box(0, 1, (3, size, size), np.uint8), Discrete(4)

        # Initial state of an episode. The head's cell is kept next to the saved scalars because every step reads it.
        middle = size // 2 * size + size // 2
        start = list(range(middle - START_LENGTH + 1, middle + 1))  # cells of the snake, from tail to head
        planes = torch.zeros(3, self._cells, dtype=torch.uint8)
        planes[BODY, start] = planes[HEAD, start[-1]] = 1
        start_scalars = (START_LENGTH, START_LENGTH - 1, RIGHT, 0, start[-1])
        self._start_planes = planes.flatten().to(device)  # [3C]
        self._start_body = torch.tensor(start, device=device)  # [3]
        self._start_scalars = torch.tensor(start_scalars, device=device).unsqueeze(1)  # [5, 1]

        # Lookup tables: heading by heading x 4 + action, cell by heading x C + cell, and offsets of planes.
        # A reverse is ignored: the snake continues straight.
        next_heading = [heading if action == heading ^ 1 else action for heading in range(4) for action in range(4)]
        self._next_heading = torch.tensor(next_heading, device=device)  # [16]
        self._next_cell = torch.tensor(_next_cells(size), device=device)  # [4C]
        self._offsets = torch.tensor([plane * self._cells for plane in (BODY, BODY, HEAD, HEAD, FOOD)], device=device)
        self._true, self._false = torch.tensor([True, False], device=device).unsqueeze(1).expand(2, count).unbind(0)
        self._step_reward = torch.full((count,), rules.step_reward, device=device)

        self._key = torch.tensor([stream.draw_seed(0) for stream in self.env_streams("snake")], device=device)  # [B]
        self._episode, self._food = torch.zeros(2, count, dtype=torch.int64, device=device).unbind(0)
        self._scalars = torch.zeros(5, count, dtype=torch.int64, device=device)
        self._length, self._front, self._heading, self._hungry, self._head = self._scalars.unbind(0)
        self._body = torch.zeros(count, self._cells, dtype=torch.int64, device=device)  # [B, C] ring
        self._planes = torch.zeros(count, 3 * self._cells, dtype=torch.uint8, device=device)
        self._obs = self._planes.view(count, 3, size, size)
        self._invalid = torch.zeros((), dtype=torch.bool, device=device)
        """Whether an action since the last check was invalid."""

    def reset(self) -> Tensor:
        self._episode.zero_()
        self._restart(self._true, self._scalars)
        self._drop_food(self._true)
        return self._obs

    def observations(self) -> Tensor:
        return self._obs

    def step(self, action: Tensor) -> Step:
        if action.shape != (self.num_envs,):
            raise actions_error(f"the actions have shape {tuple(action.shape)}", self.num_envs)
        cells, rules = self._cells, self._rules
        action = action.to(self.device, torch.int64)
        # Raising here would wait for the device. Invalid actions are mapped to valid ones instead, and
        # `on_iteration_start` and `lane_state` raise: before the next iteration, and before anything is saved.
        self._invalid.logical_or_((action & ~3).any())

        # Move. A step into a wall leads to the head's own cell, which is occupied.
        heading = self._next_heading[torch.add(action & 3, self._heading, alpha=4)]
        cell = self._next_cell[torch.add(self._head, heading, alpha=cells)]
        tail = self._body.gather(1, ((self._front - self._length + 1) % cells).unsqueeze(1)).squeeze(1)
        occupied = self._planes.gather(1, cell.unsqueeze(1)).squeeze(1)  # the body is the first plane
        died = occupied.logical_and(cell != tail)  # the tail leaves its cell as the head arrives
        ate = cell == self._food
        alive = ~died
        head = torch.where(died, self._head, cell)  # a dead snake stays where it was
        front = (self._front + alive) % cells
        self._body.scatter_(1, front.unsqueeze(1), head.unsqueeze(1))
        # Cells that coincide get the same value, so their order does not matter.
        touched = torch.stack([tail, head, self._head, head, head], dim=1) + self._offsets
        values = torch.stack([died | ate | (tail == head), self._true, died, self._true, self._false], dim=1)
        self._planes.scatter_(1, touched, values.view(torch.uint8))
        length, hungry = self._length + ate, (self._hungry + alive).masked_fill_(ate, 0)

        # Rewards and ends of episodes.
        full = length == cells
        terminated, starved = died | full, hungry >= rules.max_steps_without_food
        truncated, ended = starved & ~terminated, starved | terminated
        reward = self._step_reward.masked_fill(ate, rules.step_reward + rules.food_reward)
        reward.masked_fill_(died, rules.step_reward + rules.death_reward)
        final_obs = self._obs.clone()
        episode_info = {"apples": (length - START_LENGTH).float(), "full": full.float()}

        # Start the next episodes, and place food where it was eaten.
        self._restart(ended, torch.stack([length, front, heading, hungry, head]))
        self._episode.add_(ended)
        self._drop_food(ate | ended)
        # Only the device knows whether any episode was truncated.
        return Step(self._obs, reward, terminated, truncated, final_obs, episode_info, any_truncated=True)

    def _restart(self, ended: Tensor, scalars: Tensor) -> None:
        """Reset the boards whose episode ended [B]; write the new scalars [5, B] of the others."""
        torch.where(ended.unsqueeze(1), self._start_planes, self._planes, out=self._planes)
        body = self._body[:, :START_LENGTH]
        torch.where(ended.unsqueeze(1), self._start_body, body, out=body)
        torch.where(ended, self._start_scalars, scalars, out=self._scalars)

    def _drop_food(self, mask: Tensor) -> None:
        """Place food on a uniformly random free cell of some boards [B]."""
        skip = integers_at(self._key, self._episode, self._length, self._cells - self._length)
        free = (1 - self._planes[:, : self._cells]).cumsum(1)  # [B, C] number of free cells up to each cell
        cell = (free <= skip.unsqueeze(1)).sum(1)
        torch.where(mask, cell, self._food, out=self._food)
        self._planes.scatter_(1, (self._food + FOOD * self._cells).unsqueeze(1), 1)

    def on_iteration_start(self, clock: TrainState) -> None:
        """Raise if an action was invalid since the last call. The game does not depend on training progress."""
        self._check_actions()

    def lane_state(self, lane: int) -> StateDict:
        """Return copies on the host, with the names, dtypes and shapes of the numba backend."""
        self._check_actions()
        rows = self.lanes.lane_slice(lane, self.envs_per_lane)
        state = {name: self._field(name)[rows].to("cpu", copy=True) for name in FIELDS}
        planes = self._planes.unflatten(1, (3, -1))[rows]
        return state | {"body": self._body[rows].int().cpu(), "planes": planes.to("cpu", copy=True)}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        rows, loaded = self.lanes.lane_slice(lane, self.envs_per_lane), self.lane_state(lane)
        load_into(loaded, state, f"Snake, lane {lane}")
        if not is_valid({name: tensor.numpy() for name, tensor in loaded.items()}):
            raise ValueError(f"Snake, lane {lane}: the saved boards are not in a valid state. Use another checkpoint.")
        for name in FIELDS:
            self._field(name)[rows] = loaded[name].to(self.device)
        self._body[rows] = loaded["body"].to(self.device, torch.int64)
        self._planes[rows] = loaded["planes"].flatten(1).to(self.device)
        self._head[rows] = self._body[rows].gather(1, self._front[rows].unsqueeze(1)).squeeze(1)

    def _field(self, name: str) -> Tensor:
        """Return one of FIELDS, [B] int64."""
        tensor: Tensor = getattr(self, f"_{name}")
        return tensor

    def _check_actions(self) -> None:
        if self._invalid.item():
            self._invalid.zero_()
            raise actions_error("an action since the start of the iteration is not one of the four", self.num_envs)

    # -- rendering -----------------------------------------------------------------------------------------------------

    def render_text(self, env: int) -> str:
        return as_text(*self._copy_board(env))

    def render(self, env: int) -> np.ndarray:
        return as_frame(*self._copy_board(env))

    def render_title(self, env: int) -> str:
        return f"Snake {self._rules.size} x {self._rules.size}"

    def render_score(self, env: int) -> str:
        return score(self._rules.size, int(self._field("length")[env]))

    def render_result(self, info: Mapping[str, float]) -> str:
        return describe_end(info)

    def _copy_board(self, env: int) -> tuple[int, dict[str, int], np.ndarray]:
        """Copy one board to the host: its size, scalars and body."""
        board = {name: int(self._field(name)[env]) for name in FIELDS}
        return self._rules.size, board, self._body[env].cpu().numpy()


def _next_cells(size: int) -> np.ndarray:
    """Return the cell ahead for every heading and cell, [4C]; the cell itself if a wall is ahead."""
    cells = np.arange(size * size)
    row, column = cells // size + np.array(ROW_STEP)[:, None], cells % size + np.array(COLUMN_STEP)[:, None]  # [4, C]
    inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    return np.where(inside, row * size + column, cells).ravel()
