"""Proximal policy optimization (PPO): collect with the current policy, then take epochs of clipped updates.

Schulman et al., 2017, arXiv:1707.06347; advantages by GAE, Schulman et al., 2016, arXiv:1506.02438.

Shapes: L local lanes, T rollout steps, E environments per lane, B = L x E local environments in lane order, M samples
per lane in a minibatch. A recurrent network is trained on sequences of S steps; N samples are N / S sequences.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lockstep.algorithms.greedy_policy import GreedyPolicy
from lockstep.algorithms.ppo_benchmark import ppo_ops
from lockstep.base import Algorithm
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.data.collector import OnPolicyCollector
from lockstep.data.nonfinite import locate_nonfinite, value_range
from lockstep.data.rollout import minibatch_at, minibatches
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.metrics import Metrics, widen
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.normalization import ObservationNormalizer, RewardNormalizer
from lockstep.nn.recurrent import PaddedSegments, RecurrentConfig, split_at_resets
from lockstep.ops.functional import Scaling, Schedule, lr_scale, moments, ppo_loss, schedule
from lockstep.protocols import BenchmarkOp, Loss, StateDict
from lockstep.pytree import tree_map
from lockstep.transfer import Uploader, upload


@dataclass(frozen=True, kw_only=True)
class PPOConfig(Algorithm.Config):
    """Settings of PPO. Every number is for the whole run, not for one process."""

    learning_rate: float = 3e-4
    """Peak learning rate; `schedule` shapes it over the run."""
    schedule: Schedule = "constant"
    """Schedule of the learning rate from its peak over the run."""
    warmup_fraction: float = 0.0
    """Fraction of the run over which the learning rate rises to its peak."""
    lr_scaling: Scaling = "none"
    """Scaling of the learning rate with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that `learning_rate` was tuned for. None: the recipe's own."""
    rollout_steps: int = 128
    """Steps each environment takes between updates."""
    batch_size: int = 2048
    """Samples per update, over all processes."""
    epochs: int = 4
    """Passes over each rollout."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation."""
    clip_coef: float = 0.2
    """Clipping range of the probability ratio."""
    clip_coef_schedule: Schedule = "constant"
    """Schedule of `clip_coef` over the run."""
    value_clip_coef: float | None = None
    """Clipping range of value predictions. None: no clipping."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Maximum norm of the gradient of the whole batch."""
    target_kl: float | None = None
    """Approximate KL divergence after which an iteration skips its remaining epochs. None: no limit."""
    grad_accum_steps: int = 1
    """Micro-batches per minibatch. Lowers memory and changes nothing else."""
    adam_eps: float = 1e-5
    """Epsilon of Adam."""
    normalize_obs: bool = False
    """Whether to standardize observations with running statistics."""
    normalize_rewards: bool = False
    """Whether to divide rewards by the running standard deviation of the discounted return."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """Encoder architecture."""
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig)
    """Recurrent layer."""
    log_std_init: float = 0.0
    """Initial logarithm of the standard deviation of continuous actions."""
    bptt_steps: int | None = None
    """Steps of backpropagation through time of a recurrent network; must divide `rollout_steps`. None: all of them."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "schedule", "warmup_fraction", "lr_scaling", "batch_size", "epochs", "gamma", "gae_lambda"),
        *("clip_coef", "clip_coef_schedule", "value_clip_coef", "entropy_coef", "value_coef", "max_grad_norm"),
        *("target_kl", "grad_accum_steps", "adam_eps"),
    )

    def validate(self, task: Any, run: RunConfig) -> None:
        """Raise ConfigError for sizes that do not divide, before any process starts."""
        if self.rollout_steps < 1:
            raise ConfigError(f"rollout_steps is {self.rollout_steps}.", "Take at least one step between updates.")
        if self.length < 1 or self.rollout_steps % self.length:
            raise ConfigError(
                f"bptt_steps is {self.length}, which does not divide a rollout_steps of {self.rollout_steps}.",
                "Use --algo.bptt-steps none to learn from all of it.",
            )
        rollout, lanes = task.num_envs * self.rollout_steps, resolve_lanes(run, 1).lanes or 0
        super().validate(task, run)
        unit = lanes * self.length
        if self.batch_size % unit:
            lower = max(unit, self.batch_size - self.batch_size % unit)
            sharers = f"{lanes} lanes" if self.length == 1 else f"{lanes} lanes with sequences of {self.length} steps"
            raise ConfigError(
                f"batch_size is {self.batch_size}, which {sharers} cannot share evenly.",
                f"Use {lower} or {lower + unit}.",
            )
        if rollout % self.batch_size:
            valid_sizes = [size for size in range(unit, rollout + 1, unit) if rollout % size == 0]
            closest = min(valid_sizes, key=lambda size: abs(size - self.batch_size), default=rollout)
            raise ConfigError(
                f"an iteration collects {task.num_envs} x {self.rollout_steps} = {rollout} samples, "
                f"which minibatches of {self.batch_size} do not divide.",
                f"Use --algo.batch-size {closest}, or change --task.num-envs or --algo.rollout-steps.",
            )

    def check_task(self, task: Any) -> None:
        self.encoder.check_image_size(task.observation_space)

    @property
    def length(self) -> int:
        """S: steps per training sequence; 1 for a feed-forward network."""
        return 1 if self.recurrent.kind == "none" else self.bptt_steps or self.rollout_steps


class PPO(Algorithm):
    """An actor-critic network trained by PPO."""

    Config = PPOConfig
    config: PPOConfig

    def setup(self) -> None:
        config, task, runtime = self.config, self.task, self.runtime
        self.actions = make_distribution(task.action_space)
        self.net = ActorCritic(
            task.observation_space, self.actions, config.encoder, config.recurrent, config.log_std_init
        )
        self.net.to(runtime.device)
        adam = FusedAdam(self.net.named_parameters(), lr=config.learning_rate, eps=config.adam_eps)
        self.optimizer = DistributedOptimizer(
            runtime,
            adam,
            max_grad_norm=config.max_grad_norm,
            accumulate=config.grad_accum_steps,
            not_compiled="" if config.recurrent.kind == "none" else "sequences are split at episode ends: shapes vary",
        )
        self.normalizer = ObservationNormalizer(task.observations(), config.normalize_obs)
        self.collector = OnPolicyCollector(self, self.net, self.actions, self.normalizer, config.length)
        self.shuffle = self.lanes.streams("ppo.shuffle")
        self.rewards = RewardNormalizer(task.num_envs, runtime.device, config.gamma)
        self.register_state("return_moments", self.rewards.moments.sums)
        self.register_lane_state("discounted", self.rewards.discounted)
        self.clip: float | Tensor = config.clip_coef
        if runtime.compilation.mode != "off":  # a compiled update reads it from a fixed address
            self.clip = torch.full((), config.clip_coef, device=runtime.device)
        self._upload = Uploader(runtime.device)
        self._segments: PaddedSegments | None = None
        """Segments of the current minibatch's sequences, if the host computed them in advance."""

    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        return self.collector.collect(clock)

    def update(self, clock: TrainState) -> Metrics:
        """Learn from the rollout just collected."""
        config = self.config
        # Schedules
        factor = lr_scale(config.lr_scaling, config.batch_size, config.reference_batch_size)
        warmup = config.warmup_fraction or (0.05 if factor > 1.0 else 0.0)
        rate = schedule(config.schedule, config.learning_rate * factor, clock.progress, warmup)
        clip = schedule(config.clip_coef_schedule, config.clip_coef, clock.progress)
        self.clip = self.clip.fill_(clip) if isinstance(self.clip, Tensor) else clip

        # Advantages, returns and their statistics over the whole run
        metrics = Metrics()
        batch = self._prepare_batch(metrics)
        if not batch:
            return self._skip_rollout(clock)

        # Epochs of minibatches
        recurrent = bool(self.collector.memory)
        rows = self.collector.to_sequences(batch) if recurrent else batch
        # On a device the host splits sequences before each step: splitting there would synchronize with the device.
        split_on_host = recurrent and self.runtime.device.type != "cpu" and not self.runtime.exact
        starts = rows["starts"].cpu() if split_on_host and config.grad_accum_steps == 1 else None
        per_lane = config.batch_size // self.lanes.num_lanes // config.length
        count = config.rollout_steps // config.length * self.envs_per_lane  # rows per lane
        for epoch in range(config.epochs):
            counter = clock.iteration * config.epochs + epoch
            order = self.shuffle.permutation(counter, count, device=self.runtime.device)
            host_starts = None
            if starts is not None:  # in the same order: host and device draw the same bits
                host_starts = minibatches(starts, self.shuffle.permutation(counter, count), per_lane)
            for index, minibatch in enumerate(minibatches(rows, order, per_lane)):
                where = f"iteration {clock.iteration + 1}, epoch {epoch + 1}, minibatch {index + 1}"
                if host_starts is not None:
                    self._segments = split_at_resets(next(host_starts)).on_device(self._upload)
                rebuild = partial(minibatch_at, rows, order, per_lane, index)
                metrics += self.optimizer.step(self.loss, minibatch, rate, where, rebuild)
            self._segments = None  # the next loss may be of another batch
            if config.target_kl is not None and metrics.latest("kl") > config.target_kl:
                break
        self.optimizer.check_last_step()  # before other state of the agent changes

        # Observation statistics. Last, so that the first epoch normalizes exactly as the acting policy did.
        if config.normalize_obs:
            samples = tree_map(lambda x: x.unflatten(0, (len(self.lanes), -1)), batch)
            table = self.normalizer.batch_stats(samples["obs"], samples.get("active"))
            self.normalizer.update(self.runtime.exact_sum(table))
        return metrics

    @torch.no_grad()
    def _prepare_batch(self, metrics: Metrics) -> dict[str, Any]:
        """Return the rollout with standardized advantages as samples [L x T x E, ...]; empty if it is not finite."""
        config, lanes, outcomes = self.config, len(self.lanes), self.collector.outcomes
        saved = self.rewards.moments.sums.clone(), self.rewards.discounted.clone()
        rewards = None
        if config.normalize_rewards:
            self.rewards.update(self.runtime.exact_sum(self.rewards.batch_stats(outcomes.buffers, lanes)))
            rewards = self.rewards(outcomes["reward"])
        batch = self.collector.batch(config.gamma, config.gae_lambda, rewards)
        active = batch.get("active")  # 1 for samples to learn from, 0 for others; None: learn from all

        # One reduction over the whole run: moments of advantages and returns, value error, range of observations
        advantages, returns = batch["advantage"], batch["return"]
        columns = [advantages, advantages.square(), returns, returns.square(), (returns - batch["value"]).square()]
        columns += [] if active is None else [active]
        # Sum per lane so that results do not depend on which lanes share a process.
        table = widen(torch.stack(columns, dim=1)).chunk(lanes)  # [T x E, 5 or 6] each
        obs_range = upload(value_range(self.collector.rollout["obs"]), self.runtime.device).expand(lanes, 1)
        sums = self.runtime.exact_sum(torch.cat([torch.stack([lane.sum(0) for lane in table]), obs_range], dim=1))
        if not sums.isfinite().all():  # some value of some process is not finite; all processes see the same sums
            self.rewards.moments.sums.copy_(saved[0])
            self.rewards.discounted.copy_(saved[1])
            return {}

        # Global advantage statistics
        count = torch.tensor(float(self.samples), dtype=torch.float64) if active is None else sums[5]
        mean, variance = moments(sums[0], sums[1], count)
        batch["advantage"] = ((advantages - mean) / (variance.sqrt() + 1e-8)).float()
        _, return_variance = moments(sums[2], sums[3], count)
        metrics.add_global("explained_variance", 1.0 - sums[4] / count / return_variance.clamp(min=1e-8), 1.0)
        if active is not None:
            metrics.add_global("active_fraction", sums[5], float(self.samples))

        # Log probabilities of the acting policy: once here instead of in every step of the rollout
        batch["log_prob"] = self.runtime.map_lanes(
            lambda part: self.actions.log_prob_and_entropy(part["outputs"], part["action"])[0],
            {name: batch[name] for name in ("outputs", "action")},
        )
        del batch["outputs"]
        if active is not None:  # with `loss`: inactive samples add nothing to the sums and the gradient
            batch |= {name: batch[name] * active for name in ("advantage", "log_prob")}
        return batch

    def _skip_rollout(self, clock: TrainState) -> Metrics:
        """Abort at a rollout with non-finite values, or skip all updates from it. The agent does not change."""
        collector, lanes = self.collector, self.lanes.local
        rollout, outcomes = collector.rollout, collector.outcomes
        # With the observation after the last step, whose value is part of this rollout.
        obs = tree_map(lambda x, last: torch.cat([x, last.unsqueeze(0)]), rollout["obs"], self.task.observations())
        values = torch.cat([rollout["value"], collector.last_value.unsqueeze(0)])
        cut = torch.where(outcomes["truncated"], collector.truncation_values, 0.0)
        inputs, outputs = {"observation": obs, "reward": outcomes["reward"]}, {"value": values, "value at a cut": cut}
        self.optimizer.nonfinite_policy.handle(
            f"iteration {clock.iteration + 1}, before update {self.updates + 1}, has a rollout that is not finite:",
            locate_nonfinite(inputs, lanes) or locate_nonfinite(outputs, lanes),
            "Fix the environment, or use --run.on-nonfinite skip to skip such iterations.",
            {"rollout": rollout.buffers | outcomes.buffers | {"last_obs": self.task.observations()}},
        )
        metrics, updates = Metrics(), torch.tensor(self.config.epochs * self.samples // self.config.batch_size)
        metrics.add_global("skipped", updates, updates)
        return metrics

    def loss(self, batch: dict[str, Any]) -> Loss:
        """Return the PPO loss of (a part of) a minibatch, as sums over its samples."""
        config, memory, segments = self.config, batch.get("memory"), self._segments
        if memory is not None:
            segments = split_at_resets(batch["starts"]) if segments is None else segments
            steps = {name: part for name, part in batch.items() if name != "memory"}
            batch = tree_map(lambda x: x.flatten(0, 1), steps)
        outputs, value = self.net(self.normalizer(batch["obs"]), memory, segments)
        log_prob, entropy = self.actions.log_prob_and_entropy(outputs, batch["action"])
        count: Tensor | int = len(value)
        if "active" in batch:  # the estimates of inactive samples are 0, too
            log_prob, entropy, value = (x * batch["active"] for x in (log_prob, entropy, value))
            count = batch["active"].sum()
        loss = ppo_loss(
            log_prob,
            entropy,
            value,
            *(batch[name] for name in ("log_prob", "advantage", "value", "return")),
            clip=self.clip,
            value_clip=config.value_clip_coef,
            value_weight=config.value_coef,
            entropy_weight=config.entropy_coef,
        )
        names = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction")
        return Loss(loss.total, num_samples=count, metric_sums=dict(zip(names, loss[1:], strict=True)))

    def policy(self) -> GreedyPolicy:
        return GreedyPolicy(self.net, self.actions, self.normalizer)

    def model_state_dict(self) -> StateDict:
        return super().model_state_dict() | self.normalizer.state()

    def load_shared_state(self, state: StateDict) -> None:
        super().load_shared_state(state)
        self.normalizer.freeze()

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        return ppo_ops(self, fewer)
