"""Soft actor-critic (SAC) with automatic temperature, for one agent with continuous actions.

Haarnoja et al., 2018, "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905.

The actor is a Gaussian squashed by tanh. It maximizes the lower value of two critics plus the entropy of its actions,
weighted by the temperature. The temperature is learned so that the mean entropy approaches `target_entropy`. Entropies
are those of actions scaled to -1..1. Target networks are not reduced, because every process updates its copy in the
same way.

Shapes: L local lanes, T rollout steps, E environments per lane, B = L x E, K action features, M samples per lane in a
batch; N = L x M samples, or M in exact mode (lane by lane).
"""

import copy
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lockstep.algorithms.actor_critic_benchmark import actor_critic_ops
from lockstep.algorithms.off_policy import check_replay_settings, scaled_rate, updates_until
from lockstep.base import Algorithm
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig
from lockstep.data.episode_statistics import EpisodeStatistics
from lockstep.data.replay_buffer import Replay, ReplayConfig, add_rollout, outcome
from lockstep.data.rollout import Rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.metrics import Metrics
from lockstep.nn.action_bounds import ActionBounds
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.q_networks import ActionInput, Actor, make_critic, soft_update
from lockstep.nn.squashed_gaussian import squashed_mode, squashed_sample
from lockstep.ops.functional import Scaling
from lockstep.protocols import BenchmarkOp, Loss, Policy
from lockstep.pytree import Tree
from lockstep.rng import LaneStreams, RandomStream
from lockstep.space_layout import refuse_critic_part


@dataclass(frozen=True, kw_only=True)
class SACConfig(Algorithm.Config):
    """Settings of SAC. Every number is for the whole run, not for one process."""

    actor_lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    temperature_lr: float = 3e-4
    """Learning rate of the temperature."""
    lr_scaling: Scaling = "none"
    """Scaling of learning rates with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that learning rates were tuned for. None: the recipe's own."""
    batch_size: int = 256
    """Samples per update, over all processes."""
    buffer_size: int = 1_000_000
    """Capacity of the replay buffer, in samples over all processes."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Storage of the replay buffer."""
    learning_starts: int = 5_000
    """Samples in the replay buffer before learning starts. Until then actions are random."""
    rollout_steps: int = 1
    """Steps each environment takes between updates."""
    updates_per_sample: float = 1.0
    """Updates per sample once learning has started."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Number of rewards in a target before the bootstrapped value."""
    tau: float = 0.005
    """Coefficient of the soft update of the target critics."""
    temperature: float | None = None
    """Weight of the entropy. None: learned, so that the mean entropy approaches `target_entropy`."""
    initial_temperature: float = 1.0
    """Weight of the entropy at the start, if it is learned."""
    target_entropy: float | None = None
    """Mean entropy of actions scaled to -1..1. None: minus the number of action features."""
    max_grad_norm: float | None = None
    """Maximum norm of the gradient of the whole batch. None: no clipping."""
    grad_accum_steps: int = 1
    """Micro-batches per batch, to save memory. One optimizer step is taken for all of them."""
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(hidden_sizes=(256,), activation="relu"))
    """Encoder architecture of each network."""
    critic_action_input: ActionInput = "first"
    """Hidden layer of the critics that receives the action. first: the encoder itself, which sees the observation and
    the action (vector observations; others use last). last: one more layer after the encoder."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = (
        *("actor_lr", "critic_lr", "temperature_lr", "lr_scaling", "batch_size", "updates_per_sample", "gamma"),
        *("n_step", "tau", "target_entropy", "max_grad_norm", "grad_accum_steps"),
    )

    def validate(self, task: Any, run: RunConfig) -> None:
        """Raise ConfigError for invalid settings, before any process starts."""
        super().validate(task, run)
        check_replay_settings(self, task, run)
        if self.initial_temperature <= 0 or (self.temperature is not None and self.temperature <= 0):
            raise ConfigError(
                f"temperature is {self.temperature} and initial_temperature {self.initial_temperature}.",
                "Use values above 0, or a temperature of none to learn it.",
            )

    def check_task(self, task: Any) -> None:
        self.encoder.check_image_size(task.observation_space)

    def updates_until(self, samples: int) -> int:
        """Return the updates due after `samples` samples."""
        return updates_until(samples, self.learning_starts, self.updates_per_sample)


class Temperature(nn.Module):
    """Positive weight of the entropy, parameterized by its logarithm."""

    def __init__(self, config: SACConfig) -> None:
        super().__init__()
        self.is_learned = config.temperature is None
        initial = config.initial_temperature if config.temperature is None else config.temperature
        self.log_value = nn.Parameter(torch.full((1,), math.log(initial)), requires_grad=self.is_learned)

    def forward(self) -> Tensor:
        return self.log_value.exp()  # [1]


class SAC(Algorithm):
    """One actor, two critics and the temperature."""

    Config = SACConfig
    config: SACConfig
    eval_share = 0.4

    def setup(self) -> None:
        config, task, runtime, lanes = self.config, self.task, self.runtime, self.lanes
        obs_space, action_space = task.observation_space, task.action_space
        refuse_critic_part(obs_space, "SAC")
        is_box = isinstance(action_space, spaces.Box) and len(action_space.shape) == 1
        if not is_box or not action_space.is_bounded():
            raise ConfigError(
                f"actions of {action_space} are not supported by SAC.",
                "Use a task with a bounded one-dimensional Box, or another recipe, such as gym-ppo.",
            )
        self.bounds, self.width = ActionBounds(action_space), int(action_space.shape[0])
        self.actor = Actor(obs_space, 2 * self.width, config.encoder).to(runtime.device)
        self.critics = nn.ModuleList(
            make_critic(obs_space, self.width, 1, config.encoder, config.critic_action_input) for _ in range(2)
        ).to(runtime.device)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.target_entropy = -float(self.width) if config.target_entropy is None else config.target_entropy
        self.temperature = Temperature(config).to(runtime.device)
        self.actor_optimizer, self.critic_optimizer = self._optimizers()
        self.random_rng, self.explore_rng = lanes.streams("sac.random"), lanes.streams("sac.exploring")
        self.actor_rng, self.target_rng = lanes.streams("sac.actions"), lanes.streams("sac.next_actions")
        self.episodes = EpisodeStatistics(lanes.local, self.envs_per_lane, runtime.device)
        self.rollout, self.outcomes, self.infos = (Rollout(config.rollout_steps) for _ in range(3))
        self._act = runtime.compilation(self._explore, "acting")
        self._update_targets = runtime.compilation(
            lambda: soft_update(self.target_critics, self.critics, config.tau), "target update"
        )
        obs, ended = task.observations(), torch.zeros(task.num_envs, dtype=torch.bool)
        example = {"obs": obs, "action": torch.zeros(task.num_envs, self.width), "reward": torch.zeros(task.num_envs)}
        example |= {"terminated": ended, "truncated": ended, "next_obs": obs}
        self.replay = Replay(config.buffer_size, lanes, example, "sac.replay", config.replay, runtime.device)
        self._transitions = partial(self.replay.transitions, steps=config.n_step, discount=config.gamma)
        if runtime.compilation.mode == "graphs" and self.replay.device.type == "cuda":
            self._transitions = runtime.compilation(partial(self._transitions, in_graph=True), "sampling")

    def _optimizers(self) -> tuple[DistributedOptimizer, DistributedOptimizer]:
        """Create one optimizer for the actor and the temperature, which learn from one loss, and one for the critics.

        Adam scales every parameter separately, so the temperature learns as with an optimizer of its own.
        """
        config = self.config
        groups: list[dict[str, Any]] = [{"params": list(self.actor.named_parameters())}]
        if self.temperature.is_learned:
            named = [(f"temperature.{name}", x) for name, x in self.temperature.named_parameters()]
            groups.append({"params": named, "lr": config.temperature_lr})
        options: dict[str, Any] = {"max_grad_norm": config.max_grad_norm, "accumulate": config.grad_accum_steps}
        actor = FusedAdam(groups, lr=config.actor_lr)
        critics = FusedAdam(self.critics.named_parameters(), lr=config.critic_lr)
        return (
            DistributedOptimizer(self.runtime, actor, **options),
            DistributedOptimizer(self.runtime, critics, **options),
        )

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        config, runtime = self.config, self.runtime
        # Random draws of the whole rollout: uniform actions before learning starts, then noise for the actor
        shape, at_random = (config.rollout_steps, self.envs_per_lane, self.width), not self._is_learning
        draw = self.random_rng.uniform if at_random else self.explore_rng.normal
        draws = draw(clock.iteration, *shape, device=runtime.device)  # [L, T, E, K]

        # Environment steps
        for t, noise in enumerate(draws.transpose(0, 1).flatten(1, 2).unbind(0)):
            obs = self.task.observations()
            with runtime.phase("act"):
                action = 2.0 * noise - 1.0 if at_random else runtime.map_lanes(self._act, {"obs": obs, "noise": noise})
                # Write before the step: the task reuses the memory of observations.
                self.rollout.write(t, {"obs": obs, "action": action})
            with runtime.phase("env"):
                step = self.task.step(self.bounds.to_env(action))
            self.outcomes.write(t, outcome(step))
            self.infos.write(t, {"rewards": step.reward, **step.episode_info})

        # Episode statistics
        ended = self.outcomes["terminated"] | self.outcomes["truncated"]
        return self.episodes.count(self.infos["rewards"], ended, {name: self.infos[name] for name in step.episode_info})

    @property
    def _is_learning(self) -> bool:
        return self.replay.count >= self.config.learning_starts

    def _explore(self, part: dict[str, Any]) -> Tensor:
        """Sample actions [B, K] between -1 and 1 from the actor."""
        with self.runtime.autocast():
            outputs = self.actor(part["obs"])
        return squashed_sample(outputs, part["noise"])[0]

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: TrainState) -> Metrics:
        """Add the rollout to the replay buffer, then take the updates that are due."""
        config, critic, actor = self.config, Metrics(), Metrics()
        # Replay buffer
        if not add_rollout(self.replay, self.rollout, self.outcomes, self.critic_optimizer, clock):
            return Metrics()

        critic_rate, actor_rate = (
            scaled_rate(config.lr_scaling, rate, config.batch_size, config.reference_batch_size, clock.progress)
            for rate in (config.critic_lr, config.actor_lr)
        )
        due = config.updates_until(clock.samples + self.samples) - config.updates_until(clock.samples)
        for number in range(due if self._is_learning else 0):
            counter, where = self.updates, f"iteration {clock.iteration + 1}, batch {number + 1} of {due}"
            batch, rebuild = self._sample_batch(counter), partial(self._sample_batch, counter)
            # Critic update
            critic += self.critic_optimizer.step(self.critic_loss, batch, critic_rate, where, rebuild)
            # Actor and temperature update
            actor += self.actor_optimizer.step(self.actor_loss, batch, actor_rate, where, rebuild)
            # Target critics
            self._update_targets()
        self.critic_optimizer.check_last_step()
        self.actor_optimizer.check_last_step()

        metrics = critic.with_prefix("critic")
        metrics += actor.with_prefix("actor")
        metrics.add_global("temperature", self.temperature().detach()[0], 1.0)
        return metrics

    def _sample_batch(self, counter: int) -> dict[str, Any]:
        """Sample a batch [L x M, ...] of the replay buffer, with noise [L x M, K] for current and next actions."""
        count, device = self.config.batch_size // self.lanes.num_lanes, self.runtime.device
        batch = self._transitions(self.replay.draw(counter, count))
        for name, streams in (("noise", self.actor_rng), ("next_noise", self.target_rng)):
            batch[name] = streams.normal(counter, count, self.width, device=device).flatten(0, 1)
        return batch

    def critic_loss(self, batch: dict[str, Any]) -> Loss:
        """Return the squared temporal-difference errors of both critics, as sums over samples."""
        # Soft targets: rewards plus the discounted lower value of the next actions, with their entropy
        with torch.no_grad():
            next_action, log_prob = squashed_sample(self.actor(batch["next_obs"]), batch["next_noise"])
            values = self._lower_value(self.target_critics, batch["next_obs"], next_action)
            target = batch["reward"] + batch["discount"] * (values - self.temperature() * log_prob)  # [N]

        # Errors of the stored actions
        q_values = [critic(batch["obs"], batch["action"]).squeeze(-1) for critic in self.critics]
        total = torch.stack([(values - target).square().sum() for values in q_values]).sum()
        return Loss(
            total, num_samples=len(target), metric_sums={"value": q_values[0].detach().sum(), "target": target.sum()}
        )

    def actor_loss(self, batch: dict[str, Any]) -> Loss:
        """Return the loss of the actor and of the temperature. Only they are updated with it."""
        action, log_prob = squashed_sample(self.actor(batch["obs"]), batch["noise"])
        value = self._lower_value(self.critics, batch["obs"], action)
        total = (self.temperature().detach() * log_prob - value).sum()
        # Temperature: its gradient is positive, so that it falls, if the entropy is above the target
        if self.temperature.is_learned:
            total = total - (self.temperature() * (log_prob.detach() + self.target_entropy)).sum()
        sums = {"value": value.detach().sum(), "entropy": -log_prob.detach().sum()}
        return Loss(total, num_samples=len(value), metric_sums=sums)

    def _lower_value(self, critics: nn.ModuleList, obs: Tree, action: Tensor) -> Tensor:
        """Return the lower value of two critics for actions [N, K], [N]."""
        one, other = (critic(obs, action).squeeze(-1) for critic in critics)
        return torch.minimum(one, other)

    # -- benchmark and policy ------------------------------------------------------------------------------------------

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """Return the operations of an iteration without the code around them: environments, inference and updates."""

        def q_values(critics: nn.ModuleList, obs: Tree, outputs: Tensor) -> list[Tensor]:
            action = squashed_mode(outputs)
            return [critic(obs, action) for critic in critics]

        def env_action() -> Tensor:
            return self.bounds.to_env(self.rollout["action"][0])

        return actor_critic_ops(self, lambda obs: obs, q_values, env_action, fewer)

    def policy(self) -> "SACPolicy":
        return SACPolicy(self.actor, self.bounds)


class SACPolicy(Policy):
    """The action of the actor's mean, or a sample of its distribution."""

    def __init__(self, actor: Actor, bounds: ActionBounds) -> None:
        self.actor, self.bounds = actor, bounds

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        outputs = self.actor(obs)
        return self.bounds.to_env(squashed_mode(outputs)), outputs, memory

    @torch.no_grad()
    def sample(self, obs: Tree, memory: Tree, seed: int, counter: int) -> tuple[Tensor, Tree]:
        outputs = self.actor(obs)
        streams = LaneStreams((RandomStream(seed, "policy.noise"),))
        noise = streams.normal(counter, len(outputs), outputs.shape[-1] // 2, device=outputs.device)[0]
        return self.bounds.to_env(squashed_sample(outputs, noise)[0]), memory
