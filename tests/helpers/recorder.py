"""An algorithm that learns one number from replay: the smallest run whose checkpoints have replay segments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from lockstep.config import Recipe, RunConfig, apply_overrides
from lockstep.data.replay_buffer import Replay, outcome
from lockstep.metrics import Metrics
from lockstep.tasks.snake.env import SnakeConfig
from lockstep.training_loop import train

LANES, ENVS, HORIZON, ROWS = 8, 2, 4, 10
ITERATION = LANES * ENVS * HORIZON
"""Samples per iteration. Each lane adds four rows per iteration and keeps ten."""


@dataclass(frozen=True, kw_only=True)
class RecorderConfig:
    capacity: int = ROWS * LANES * ENVS

    def validate(self, task, run): ...

    def check_task(self, task): ...

    def samples_per_iteration(self, task):
        return ITERATION

    def build(self, task, runtime):
        return Recorder(self, task, runtime)


class Recorder:
    """Acts at random, stores transitions, and sums what it samples: the sum depends on every bit of replay."""

    eval_share = 0.05

    def __init__(self, config, task, runtime):
        self.task, self.runtime, self.samples, self.updates = task, runtime, ITERATION, 0
        self.sum = torch.zeros(2, dtype=torch.float64)
        example = {"obs": task.observations(), "action": torch.zeros(task.num_envs, dtype=torch.int64)}
        ended = torch.zeros(task.num_envs, dtype=torch.bool)
        example |= {"reward": torch.zeros(task.num_envs), "terminated": ended, "truncated": ended}
        self.replay = Replay(config.capacity, runtime.lanes, example | {"next_obs": task.observations()})
        self.actions = runtime.lanes.streams("recorder")

    def collect(self, clock):
        for action in self.actions.integers(clock.iteration, 4, HORIZON, ENVS).transpose(0, 1).flatten(1, 2):
            before = {"obs": self.task.observations().clone(), "action": action}
            self.replay.write(before | outcome(self.task.step(action)))
        return Metrics()

    def update(self, clock):
        batch = self.replay.sample(clock.iteration, 16, steps=3, discount=0.9)
        columns = [batch["reward"].double() * batch["action"], batch["next_obs"].flatten(1).sum(1) * batch["discount"]]
        table = torch.stack(columns, dim=1).view(len(self.runtime.lanes), 16, 2).sum(1)
        self.sum += self.runtime.exact_sum(table)
        self.updates += 1
        return Metrics()

    def shared_state(self):
        return {"sum": self.sum, "updates": torch.tensor(self.updates)}

    def load_shared_state(self, state):
        self.sum.copy_(state["sum"])
        self.updates = int(state["updates"])

    def lane_state(self, lane):
        return {f"replay.{name}": value for name, value in self.replay.lane_state(lane).items()}

    def load_lane_state(self, lane, state):
        self.replay.load_lane_state(lane, {name.removeprefix("replay."): x for name, x in state.items()})


@dataclass(frozen=True, kw_only=True)
class Recording(Recipe):
    name: ClassVar[str] = "recording"
    smoke_overrides: ClassVar[Mapping[str, Any]] = {}
    task: SnakeConfig = field(
        default_factory=lambda: SnakeConfig(size=4, num_envs=LANES * ENVS, max_steps_without_food=6)
    )
    algo: RecorderConfig = field(default_factory=RecorderConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(
            total_samples=6 * ITERATION,
            log_every=ITERATION,
            save_every=ITERATION,
            eval_every=None,
            keep_last=100,
            lanes=LANES,
            reduction="exact",
            device="cpu",
            collective_timeout=20.0,
        )
    )


def record(directory: str | Path, name: str = "run", resume: bool = False, **settings: Any) -> Path:
    """Train and return the run's path; `settings` override the run's settings."""
    recipe = apply_overrides(Recording(), {"run": {"runs_dir": str(directory), "name": name, **settings}})
    return train(recipe, resume=resume).path
