"""TD-MPC2: learn a latent world model from the replay buffer, and plan actions in it with MPPI.

Hansen et al., 2023, arXiv:2310.16828.

Every update takes one step of the model and one of the policy, which learns from the latents of the model's step. The
policy loss divides values by a running scale. It is updated from the global batch before the policy step.

Shapes: L local lanes, E environments per lane, B = L x E, M samples per lane in a batch, N = L x M samples (or M in
exact mode, lane by lane), H horizon, K action features, Z latent features, R planning iterations.
"""

import copy
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from gymnasium.spaces import Box
from torch import Tensor

from lockstep.algorithms.tdmpc2.benchmark import benchmark_ops
from lockstep.algorithms.tdmpc2.losses import LossConfig, model_loss, policy_loss, policy_sample_and_value
from lockstep.algorithms.tdmpc2.mppi import (
    PlanConfig,
    Planner,
    PlanningPolicy,
    PriorPolicy,
    sample_critic_pairs,
    shift_mean,
    split_obs,
)
from lockstep.algorithms.tdmpc2.world_model import WorldModel, WorldModelConfig
from lockstep.base import Algorithm
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.data.episode_statistics import EpisodeStatistics
from lockstep.data.replay_buffer import Replay, ReplayConfig, add_rollout, outcome
from lockstep.data.rollout import Rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.ops.functional import Scaling, scaled_rate
from lockstep.ops.random_shift import random_shift
from lockstep.ops.two_hot import discount_from_episode_length, percentile_range
from lockstep.protocols import BenchmarkOp, Loss, SubtaskSpec
from lockstep.pytree import Tree


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
    """Actions of these samples. agent: planned by the agent, for a run that starts from trained weights."""
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
        return int(samples * self.updates_per_sample) if samples >= self.seed_samples else 0


class TDMPC2(Algorithm):
    """A world model, its policy and its critics."""

    Config = TDMPC2Config
    config: TDMPC2Config

    def setup(self) -> None:
        config, task, runtime, lanes = self.config, self.task, self.runtime, self.lanes
        device = runtime.device
        self.lane_batch = config.batch_size // lanes.num_lanes
        space = task.action_space
        if not isinstance(space, Box) or not space.is_bounded() or len(space.shape) != 1:
            raise ConfigError(
                f"actions of {space} are not supported by TD-MPC2.",
                "Use a task with a bounded one-dimensional Box, or another algorithm: --recipe gym-ppo.",
            )
        low, high = torch.from_numpy(task.action_space.low), torch.from_numpy(task.action_space.high)
        self.action_bias = ((high + low) / 2).to(device)
        self.action_scale = ((high - low) / 2).to(device)
        parts = getattr(task, "parts", ())
        actions = tuple(part.actions for part in parts) or (int(task.action_space.shape[0]),)
        self.model = WorldModel(config.model, task.observation_space, actions, config.episodic).to(device)
        self.targets = copy.deepcopy(self.model.critics).requires_grad_(False)
        self.scale = self.register_state("scale", torch.ones(1, device=device))
        self.discounts = torch.tensor(_discounts(config, parts), device=device)
        self.planner = Planner(self.model, config.plan, config.horizon, self.discounts)
        self.model_optimizer, self.policy_optimizer = self._optimizers()
        self.act_rng, self.elite_rng = lanes.streams("tdmpc2.acting"), lanes.streams("tdmpc2.choosing")
        self.noise_rng, self.dropout_rng = lanes.streams("tdmpc2.noise"), lanes.streams("tdmpc2.forgetting")
        self.shift_rng = lanes.streams("tdmpc2.shifting")
        self.pair_rng = lanes.shared_stream("tdmpc2.pairs")
        self.plan_pair_rng = lanes.shared_stream("tdmpc2.plan_pairs")
        self.pairs = torch.zeros(2, 2, dtype=torch.int64, device=device)
        """Critics of the current update: two for the targets and two for the policy loss."""
        self.latents = torch.zeros(len(lanes) * self.lane_batch, config.horizon + 1, self.model.latent, device=device)
        """Latents of the model's last step, from which the policy learns."""
        self.episodes = EpisodeStatistics(lanes.local, self.envs_per_lane, runtime.device)
        self.plans = torch.zeros(task.num_envs, config.horizon, self.model.actions, device=device)  # [B, H, K]
        self.register_lane_state("plans", self.plans)
        self.rollout, self.outcomes, self.infos = (Rollout(config.rollout_steps) for _ in range(3))
        obs, ended = task.observations(), torch.zeros(task.num_envs, dtype=torch.bool)
        example = {"obs": obs, "action": torch.zeros(task.num_envs, self.model.actions)}
        example |= {"reward": torch.zeros(task.num_envs), "terminated": ended, "truncated": ended, "next_obs": obs}
        self.replay = Replay(config.buffer_size, lanes, example, "tdmpc2.replay", config.replay, runtime.device)
        self._plan = runtime.compilation(self._plan_for, "planning")
        self._prior = runtime.compilation(self._follow_policy, "acting")
        self._policy_value = runtime.compilation(self._compute_policy_value, "the policy's value")
        self._update_targets = runtime.compilation(self._soft_update_targets, "target update")

    def _optimizers(self) -> tuple[DistributedOptimizer, DistributedOptimizer]:
        """Create one optimizer for the model and one for its policy. Each updates only its own parameters."""
        config, names = self.config, list(self.model.named_parameters())
        encoder = [(name, p) for name, p in names if name.startswith("encoder.")]
        policy = [(name, p) for name, p in names if name.startswith("policy.")]
        rest = [(name, p) for name, p in names if not name.startswith(("encoder.", "policy."))]
        groups: list[dict[str, Any]] = [{"params": rest}]
        groups.append({"params": encoder, "lr": config.learning_rate * config.encoder_lr_scale})
        options: dict[str, Any] = {"max_grad_norm": config.max_grad_norm, "accumulate": config.grad_accum_steps}
        model = FusedAdam(groups, lr=config.learning_rate)
        pi = FusedAdam(policy, lr=config.learning_rate, eps=1e-5)
        return DistributedOptimizer(self.runtime, model, **options), DistributedOptimizer(self.runtime, pi, **options)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        config, runtime = self.config, self.runtime
        # Environment steps
        for t in range(config.rollout_steps):
            obs = self.task.observations()
            with runtime.phase("act"):
                action = self._act(obs, clock.iteration * config.rollout_steps + t)
                self.rollout.write(t, {"obs": obs, "action": action})  # before the step reuses their memory
            with runtime.phase("env"):
                step = self.task.step(action * self.action_scale + self.action_bias)
            # Reset the plans of ended episodes
            done = (step.terminated | step.truncated).to(runtime.device)
            self.plans.masked_fill_(done[:, None, None], 0.0)
            self.outcomes.write(t, outcome(step))
            self.infos.write(t, {"rewards": step.reward, **step.episode_info})
        # Episode statistics
        ended = self.outcomes["terminated"] | self.outcomes["truncated"]
        return self.episodes.count(self.infos["rewards"], ended, {name: self.infos[name] for name in step.episode_info})

    def _act(self, obs: Tree, counter: int) -> Tensor:
        """Return actions [B, K]: random before learning starts, then planned, or without `mpc` from the policy."""
        config, device = self.config, self.runtime.device
        # Random actions
        if config.seed_policy == "random" and self.replay.count < config.seed_samples:
            uniform = self.act_rng.uniform(counter, self.envs_per_lane, self.model.actions, device=device).flatten(0, 1)
            return (2.0 * uniform - 1.0) * self.model.mask(split_obs(obs)[1])
        # Policy
        if not config.mpc:
            normal = self.act_rng.normal(counter, self.envs_per_lane, self.model.actions, device=device).flatten(0, 1)
            action: Tensor = self.runtime.map_lanes(self._prior, {"obs": obs, "noise": normal})
            return action
        # MPPI
        noise = self.planner.draw_noise(self.act_rng, self.elite_rng, counter, self.envs_per_lane)
        pairs = self.planner.draw_pairs(self.plan_pair_rng, counter)
        planned = self.runtime.map_lanes(
            lambda part: self._plan(part, pairs), {"obs": obs, "plan": self.plans, "noise": noise}
        )
        self.plans.copy_(planned["mean"])
        return planned["action"]

    def _plan_for(self, part: dict[str, Any], pairs: Tensor) -> Tree:
        with self.runtime.autocast():
            action, mean = self.planner.plan(
                *split_obs(part["obs"]), shift_mean(part["plan"]), part["noise"], pairs, explore=True
            )
        return {"action": action, "mean": mean}

    def _follow_policy(self, part: dict[str, Any]) -> Tensor:
        obs, task = split_obs(part["obs"])
        with self.runtime.autocast():
            return self.model.act(self.model.encode(obs, task), part["noise"], task).action

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: TrainState) -> Metrics:
        """Add the rollout to the replay buffer, then take the updates that are due."""
        config, model, policy, metrics = self.config, Metrics(), Metrics(), Metrics()
        # Replay buffer
        if not add_rollout(self.replay, self.rollout, self.outcomes, self.model_optimizer, clock):
            return metrics

        size, reference = config.batch_size, config.reference_batch_size
        rate = scaled_rate(config.lr_scaling, config.learning_rate, size, reference, clock.progress)
        due = config.updates_until(clock.samples + self.samples) - config.updates_until(clock.samples)
        for number in range(due):
            counter, where = self.updates, f"iteration {clock.iteration + 1}, batch {number + 1} of {due}"
            batch, rebuild = self._sample_batch(counter), partial(self._sample_batch, counter)
            # Model update: encoder, dynamics, reward, termination and critics
            model += self.model_optimizer.step(self.model_loss, batch, rate, where, rebuild)
            self.model.limit_task_norms()
            # Value scale
            policy_batch = self._policy_batch(batch)
            self._rescale(policy_batch)
            # Policy update
            rebuild = partial(self._rebuild_policy_batch, counter)
            policy += self.policy_optimizer.step(self.policy_loss, policy_batch, rate, where, rebuild)
            # Target critics
            self._update_targets()
        self.model_optimizer.check_last_step()
        self.policy_optimizer.check_last_step()

        metrics += model.with_prefix("model")
        metrics += policy.with_prefix("policy")
        metrics.add_global("scale", self.scale.detach()[0], 1.0)
        return metrics

    def add_random_draws(self, batch: dict[str, Any], counter: int) -> dict[str, Any]:
        """Add the random draws of an update to sequences [L x M, ...]: shifts, noise, dropout masks, critic pairs."""
        config, count = self.config, self.lane_batch
        critics, actions, device = self.model.critics.count, self.model.actions, self.runtime.device
        batch["obs"], task = split_obs(batch["obs"])
        if task is not None:
            batch["task"] = task[:, 0]
        # Random shifts, one for each image
        if self.model.images and config.random_shift:
            choices, steps = 2 * config.random_shift + 1, config.horizon + 1
            offsets = self.shift_rng.integers(counter, choices, count, steps, 2, device=device).flatten(0, 1)
            channels_last = bool(self.model.encoder.channels_last)
            batch["obs"] = random_shift(batch["obs"], offsets, config.random_shift, channels_last)
        batch["row"], batch["whole"] = torch.arange(len(self.latents), device=device), batch["whole"].float()
        # Noise of target actions and of the policy's actions
        steps, policy_steps = config.horizon, config.horizon + 1
        noise = self.noise_rng.normal(counter, count, steps + policy_steps, actions, device=device).flatten(0, 1)
        batch["target"], batch["policy"] = noise.split((steps, policy_steps), dim=1)
        # Dropout masks of the critics
        if config.model.dropout:
            sizes, width = (critics * steps, 2 * policy_steps), config.model.shape().width
            dropped = self.dropout_rng.bernoulli_sparse(
                counter, config.model.dropout, count, sum(sizes), width, device=device
            )
            kept, policy_kept = (~dropped.flatten(0, 1)).split(sizes, dim=1)
            batch["kept"] = kept.unflatten(1, (critics, steps))
            batch["policy_kept"] = policy_kept.unflatten(1, (2, policy_steps))
        # Critic pairs
        self.pairs.copy_(sample_critic_pairs(self.pair_rng, counter, 2, critics, device))
        return batch

    def _sample_batch(self, counter: int) -> dict[str, Any]:
        return self.add_random_draws(self.replay.slices(counter, self.lane_batch, self.config.horizon), counter)

    def _policy_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the policy loss, after the model's step on a batch."""
        names = ("task", "whole", "policy", "policy_kept")
        return {"z": self.latents} | {name: batch[name] for name in names if name in batch}

    @torch.no_grad()
    def _rebuild_policy_batch(self, counter: int) -> dict[str, Any]:
        """Return the inputs of the policy loss of an earlier update, with latents of the current model."""
        batch = self._sample_batch(counter)
        self.model_loss(batch)
        return self._policy_batch(batch)

    def model_loss(self, batch: dict[str, Any]) -> Loss:
        result, latents = model_loss(self.model, self.targets, self.discounts, self.pairs[0], self.config.loss, batch)
        self.latents.index_copy_(0, batch["row"], latents.float())  # by row: a batch may come in parts
        return result

    def policy_loss(self, batch: dict[str, Any]) -> Loss:
        """Return the policy loss. Only the policy is updated with it."""
        return policy_loss(self.model, self.scale, self.pairs[1], self.config.loss, batch)

    @torch.no_grad()
    def _rescale(self, batch: dict[str, Any]) -> None:
        """Update the value scale from the percentile range of the policy's values at the first step, over all lanes."""
        first = {name: x[:, :1] if name in ("z", "policy") else x for name, x in batch.items()}
        if "policy_kept" in batch:
            first["policy_kept"] = batch["policy_kept"][:, :, :1]
        lanes = self.lanes
        table = torch.zeros(lanes.num_lanes, self.lane_batch, device=self.runtime.device)
        values = self.runtime.map_lanes(self._policy_value, first)
        table[lanes.local.start : lanes.local.stop] = values.view(len(lanes), self.lane_batch)
        # Gather by summation: all other processes contribute zeros to a row, and adding zero is exact.
        value_range = percentile_range(self.runtime.all_reduce_sum(table).flatten())
        # A non-finite range leaves the scale unchanged on every process. The optimizer reports the non-finite values.
        self.scale.lerp_(torch.where(value_range.isfinite(), value_range, self.scale), self.config.tau)

    def _compute_policy_value(self, part: dict[str, Any]) -> Tensor:
        with self.runtime.autocast():
            return policy_sample_and_value(self.model, self.pairs[1], part)[1].flatten().float()

    @torch.no_grad()
    def _soft_update_targets(self) -> None:
        """Soft-update the target critics (Polyak averaging)."""
        torch._foreach_lerp_(list(self.targets.parameters()), list(self.model.critics.parameters()), self.config.tau)

    # -- benchmark and policy ------------------------------------------------------------------------------------------

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        return benchmark_ops(self, fewer)

    def policy(self) -> PlanningPolicy | PriorPolicy:
        if not self.config.mpc:
            return PriorPolicy(self.model, self.action_bias, self.action_scale)
        return PlanningPolicy(self.planner, self.action_bias, self.action_scale)


def _discounts(config: TDMPC2Config, parts: tuple[SubtaskSpec, ...]) -> list[float]:
    """Return the discount factor of each task."""
    if config.gamma is None and not parts:
        raise ConfigError(
            "gamma is none, but the task does not say how long an episode is.", "Set the discount: --algo.gamma 0.99."
        )
    if config.gamma is not None:
        return [config.gamma] * max(1, len(parts))
    return [discount_from_episode_length(part.length) for part in parts]
