"""Settings of TD-MPC2.

Hansen et al., 2023, arXiv:2310.16828.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from lockstep.algorithms.tdmpc2.losses import LossConfig
from lockstep.algorithms.tdmpc2.mppi import PlanConfig
from lockstep.algorithms.tdmpc2.world_model import WorldModelConfig
from lockstep.base import Algorithm
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.data.episodes import absolute_paths, read_index
from lockstep.data.replay_buffer import ReplayConfig
from lockstep.lanes import Lanes
from lockstep.ops.functional import Scaling
from lockstep.ops.two_hot import discount_from_episode_length
from lockstep.protocols import SubtaskSpec


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Learning from data sets of episodes, before and besides the samples of the environments."""

    data: tuple[str, ...] = ()
    """Directories that `lockstep episodes` wrote. Empty: learn from the environments alone."""
    samples: int = 0
    """Samples at the start of the run that take no steps in the environments: their updates use the data alone."""
    fraction: float = 0.5
    """Share of the data in each batch after these samples. The rest is from the replay buffer."""

    def validate(self) -> None:
        """Raise ConfigError for invalid settings and for data that cannot be read."""
        if self.samples < 0 or not 0 <= self.fraction <= 1 or (self.samples and not self.data):
            raise ConfigError(
                f"offline.samples is {self.samples}, offline.fraction {self.fraction} and offline.data "
                f"{', '.join(self.data) or 'empty'}.",
                "Use 0 samples or more, a fraction from 0 to 1, and data for samples: --algo.offline.data DIR",
            )
        for directory in self.data:
            read_index(directory)


@dataclass(frozen=True, kw_only=True)
class TDMPC2Config(Algorithm.Config):
    """Settings of TD-MPC2. Every number is for the whole run, not for one process."""

    learning_rate: float = 3e-4
    """Learning rate of all networks."""
    encoder_lr_scale: float = 0.3
    """Factor on the learning rate of the encoder."""
    lr_scaling: Scaling = "none"
    """Scaling of learning rates with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that learning rates were tuned for. None: the recipe's own."""
    batch_size: int = 256
    """Sequences of `horizon` steps per update, over all processes."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in samples over all processes."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Storage of the replay buffer."""
    seed_samples: int = 2_500
    """Samples before learning starts. The updates for these samples are then taken at once."""
    seed_policy: Literal["random", "agent"] = "random"
    """Actions of these samples. agent: planned by the agent, for a run that starts from trained weights. A run that
    first learns offline also uses the agent."""
    rollout_steps: int = 1
    """Steps each environment takes between updates."""
    updates_per_sample: float = 1.0
    """Updates per sample."""
    horizon: int = 3
    """Steps that the model predicts, in learning and in planning."""
    gamma: float | None = None
    """Discount factor. None: derived from the episode length of each task, 0.99 for 500 steps."""
    episodic: bool = False
    """Whether episodes can terminate, so that the model predicts it. Those of the control suite are only truncated."""
    tau: float = 0.01
    """Coefficient of the soft update of the target critics and of the value scale."""
    max_grad_norm: float = 20.0
    """Maximum norm of the gradient of the whole batch, separately for model and policy."""
    grad_accum_steps: int = 1
    """Micro-batches per batch, to save memory. One optimizer step is taken for all of them."""
    random_shift: int = 3
    """Largest random shift of images in learning, in pixels. 0: none."""
    mpc: bool = True
    """Whether to plan actions. Otherwise they are sampled from the policy."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Weights of the losses."""
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    """Learning from data sets of episodes."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """Settings of the planner."""
    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    """Architecture of the networks."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "encoder_lr_scale", "batch_size", "updates_per_sample", "gamma", "tau", "max_grad_norm"),
        *("lr_scaling", "grad_accum_steps", "mpc", "loss", "plan", "seed_policy", "random_shift"),
    )

    def validate(self, task: Any, run: RunConfig) -> None:
        """Raise ConfigError for invalid settings, before any process starts."""
        lanes = resolve_lanes(run, 1).lanes or 0
        Lanes(lanes, range(0), run.seed).per_lane(task.num_envs, "num_envs")
        Lanes(lanes, range(0), run.seed).per_lane(self.batch_size, "batch_size")
        self.model.shape()
        self.plan.validate()
        self.offline.validate()
        tasks = getattr(task, "num_tasks", 1)
        if task.num_envs % tasks:
            raise ConfigError(
                f"num_envs is {task.num_envs}, which {tasks} tasks cannot share evenly.",
                f"Use --task.num-envs {math.lcm(tasks, lanes)}, a multiple of {tasks} tasks and {lanes} lanes.",
            )
        if (
            min(self.horizon, self.rollout_steps, self.grad_accum_steps) < 1
            or self.updates_per_sample <= 0
            or self.random_shift < 0
            or not 0 < self.tau <= 1
        ):
            raise ConfigError(
                f"horizon is {self.horizon}, rollout_steps {self.rollout_steps}, grad_accum_steps "
                f"{self.grad_accum_steps}, updates_per_sample {self.updates_per_sample}, tau {self.tau} and "
                f"random_shift {self.random_shift}.",
                "Use 1 or more for the first three, more than 0 for the next two, at most 1 for tau, and 0 or more for "
                "random_shift.",
            )
        if not task.num_envs * self.horizon <= self.seed_samples <= self.buffer_size:
            raise ConfigError(
                f"seed_samples is {self.seed_samples}, but must be at least num_envs x horizon ({task.num_envs} x "
                f"{self.horizon}) and at most buffer_size ({self.buffer_size}).",
                f"Set --algo.seed-samples to at least {task.num_envs * self.horizon}, or increase --algo.buffer-size.",
            )

    def updates_until(self, samples: int) -> int:
        """Return the updates due after `samples` samples. They depend on the clock only, so a resume adds none."""
        waiting = samples < self.seed_samples and not self.offline.data
        return 0 if waiting else int(samples * self.updates_per_sample)

    def with_absolute_paths(self) -> "TDMPC2Config":
        """Resolve the directories of data against the working directory."""
        return replace(self, offline=replace(self.offline, data=absolute_paths(self.offline.data)))


def discounts(config: TDMPC2Config, parts: tuple[SubtaskSpec, ...]) -> list[float]:
    """Return the discount factor of each task."""
    if config.gamma is None and not parts:
        raise ConfigError(
            "gamma is none, but the task does not say how long an episode is.", "Set the discount: --algo.gamma 0.99."
        )
    if config.gamma is not None:
        return [config.gamma] * max(1, len(parts))
    return [discount_from_episode_length(part.length) for part in parts]
