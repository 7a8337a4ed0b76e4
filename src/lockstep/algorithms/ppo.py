"""PPO: collect with the current policy, then a few epochs of clipped updates on what was collected.

Shapes: L local lanes, T horizon, E environments a lane, B = L x E local environments, N = T x E samples a lane,
M samples a lane in a minibatch.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ConfigError, RunConfig, with_lanes
from lockstep.data.rollout import Episodes, Rollout, samples, take
from lockstep.functional import (
    Schedule,
    clipped_surrogate,
    clipped_value_loss,
    generalized_advantages,
    kl_estimate,
    moments,
    schedule,
)
from lockstep.nets.actions import Actions, build_actions
from lockstep.nets.actor_critic import ActorCritic
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.init import initialising
from lockstep.nets.normalizer import ObservationNormalizer, RunningMoments
from lockstep.protocols import Clock, Loss, Metrics, State, VecEnv
from lockstep.runtime import Optimizer, Runtime
from lockstep.trees import Tree, copy_into, tree_map


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO. Every number is for the whole run, not for one process."""

    learning_rate: float = 3e-4
    """Peak learning rate; `schedule` shapes it over the run."""
    schedule: Schedule = "constant"
    """How the learning rate goes from its peak over the run."""
    warmup: float = 0.0
    """Part of the run over which the learning rate rises to its peak."""
    horizon: int = 128
    """Steps each environment takes between updates."""
    batch_size: int = 2048
    """Samples of one update, over all processes."""
    epochs: int = 4
    """Passes over what was collected."""
    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 0.95
    """Trace decay of the advantage estimate."""
    clip: float = 0.2
    """How far the policy's probability ratio may move in one iteration before its gradient stops."""
    clip_schedule: Schedule = "constant"
    """How `clip` goes over the run."""
    value_clip: float | None = None
    """The same for values; none does not clip them."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """The gradient of the whole batch is clipped to this norm."""
    target_kl: float | None = None
    """Stop an update's epochs early when the policy has moved this far. None never stops."""
    accumulate: int = 1
    """Micro-batches a minibatch is cut into; lowers memory, changes nothing else."""
    adam_epsilon: float = 1e-5
    """Adam's denominator offset."""
    normalize_obs: bool = False
    """Shift and scale observations by their running moments."""
    normalize_rewards: bool = False
    """Scale rewards by the running deviation of the discounted return."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """Shape of the network."""

    def check(self, task: Any, run: RunConfig) -> None:
        """Refuse numbers that do not divide, in words, before any process starts."""
        rollout, lanes = task.num_envs * self.horizon, with_lanes(run, 1).lanes or 0
        if self.batch_size % lanes:
            below = max(lanes, self.batch_size - self.batch_size % lanes)
            raise ConfigError(
                f"batch_size is {self.batch_size}, which {lanes} lanes cannot share evenly.",
                f"Use {below} or {below + lanes}.",
            )
        if rollout % self.batch_size:
            fits = [size for size in range(lanes, rollout + 1, lanes) if rollout % size == 0]
            near = min(fits, key=lambda size: abs(size - self.batch_size), default=rollout)
            raise ConfigError(
                f"an iteration collects {task.num_envs} x {self.horizon} = {rollout} samples, "
                f"which minibatches of {self.batch_size} do not divide.",
                f"Use --algo.batch-size {near}, or change --task.num-envs or --algo.horizon.",
            )

    def iteration_samples(self, task: Any) -> int:
        return int(task.num_envs * self.horizon)

    def build(self, task: VecEnv, runtime: Runtime) -> "PPO":
        return PPO(self, task, runtime)


class PPO:
    """One agent learning by PPO."""

    def __init__(self, config: PPOConfig, task: VecEnv, runtime: Runtime) -> None:
        self.config, self.task, self.runtime = config, task, runtime
        lanes = runtime.lanes
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.count * self.envs * config.horizon
        self.actions = build_actions(task.action_space)
        with initialising(lanes.shared_stream("ppo.init")):
            self.net = ActorCritic(task.observation_space, self.actions, config.encoder).to(runtime.device)
        rate = torch.optim.Adam(
            self.net.named_parameters(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        self.optimizer = Optimizer(runtime, rate, max_grad_norm=config.max_grad_norm, accumulate=config.accumulate)
        self.noise, self.shuffle = lanes.streams("ppo.noise"), lanes.streams("ppo.shuffle")
        self.normalizer = ObservationNormalizer(task.reset(), config.normalize_obs)
        self.return_moments = RunningMoments(1, runtime.device)
        self.discounted = torch.zeros(len(lanes), self.envs, device=runtime.device)  # [L, E], for reward scaling
        self.episodes = Episodes(lanes.local, self.envs)
        self.rollout = Rollout(len(lanes), config.horizon, self.envs)
        self.cut_values = torch.zeros(self.rollout.shape, device=runtime.device)  # [L, T, E], read where truncated
        self.clip = config.clip

    @property
    def updates(self) -> int:
        return int(self.optimizer.updates)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: Clock) -> Metrics:
        """Take `horizon` steps in every environment."""
        config, rollout = self.config, self.rollout
        noise = self.actions.noise(self.noise, clock.iteration, config.horizon, self.envs).to(self.runtime.device)
        obs = self._by_lane(self.task.observe())
        for t in range(config.horizon):
            acted = self.runtime.map_lanes(self._act, {"obs": obs, "noise": noise[:, t]})
            rollout.write(t, obs=obs, **acted)
            step = self.task.step(acted["action"].flatten(0, 1))
            outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
            rollout.write(t, **self._by_lane(outcome | step.episode))
            if step.truncated.any():
                # What was cut off goes on in value from its last observation, not from the next episode's first.
                self.cut_values[:, t] = self.runtime.map_lanes(self._value, self._by_lane(step.final_obs))
            obs = self._by_lane(step.obs)
        self.last_value = self.runtime.map_lanes(self._value, obs)  # [L, E]
        extras = {name: rollout.tensor(name) for name in step.episode}
        ended = rollout.tensor("terminated") | rollout.tensor("truncated")
        return self.episodes.count(rollout.tensor("reward"), ended, extras)

    def _act(self, part: dict[str, Tensor]) -> Tree:
        with self.runtime.autocast():
            outputs, value = self.net(self.normalizer(part["obs"]))
        action = self.actions.sample(outputs, part["noise"])
        return {"action": action, "log_prob": self.actions.log_prob(outputs, action), "value": value}

    def _value(self, obs: Tree) -> Tensor:
        with self.runtime.autocast():
            return self.net.value(self.normalizer(obs))

    def _by_lane(self, tree: Any) -> Any:
        return tree_map(lambda x: x.unflatten(0, (len(self.runtime.lanes), self.envs)), tree)  # [L, E, ...]

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: Clock) -> Metrics:
        """Learn from the rollout just collected."""
        config = self.config
        rate = schedule(config.schedule, config.learning_rate, clock.progress, config.warmup)
        self.clip = schedule(config.clip_schedule, config.clip, clock.progress)
        metrics = Metrics()
        batch = self._batch(metrics)
        per_lane = config.batch_size // self.runtime.lanes.count
        for epoch in range(config.epochs):
            order = self.shuffle.permutation(clock.iteration * config.epochs + epoch, config.horizon * self.envs)
            for rows in order.to(self.runtime.device).split(per_lane, dim=1):  # [L, M]
                metrics += self.optimizer.step(self.loss, take(batch, rows), rate)
            if config.target_kl is not None and metrics.latest("kl") > config.target_kl:
                break
        if config.normalize_obs:
            # Last, so that the first epoch sees the observations exactly as the acting policy saw them.
            self.normalizer.merge(self.runtime.pool(self.normalizer.table(batch["obs"])))
        return metrics

    @torch.no_grad()
    def _batch(self, metrics: Metrics) -> dict[str, Any]:
        """The rollout with its advantages and returns, as samples [L, N, ...]."""
        config, rollout = self.config, self.rollout
        values, terminated, truncated = (rollout.tensor(name) for name in ("value", "terminated", "truncated"))
        following = torch.cat([values[:, 1:], self.last_value.unsqueeze(1)], dim=1)  # [L, T, E]
        following = torch.where(truncated, self.cut_values, following)
        ended = terminated | truncated
        rewards = (
            self._scaled(rollout.tensor("reward"), ended) if config.normalize_rewards else rollout.tensor("reward")
        )
        advantages = generalized_advantages(
            rewards, values, following, terminated, ended, config.gamma, config.gae_lambda, time=1
        )
        returns = advantages + values
        table = [advantages, advantages.square(), returns, returns.square(), (returns - values).square()]
        sums = self.runtime.pool(_sums_by_lane([x.flatten(1) for x in table]))
        count = torch.tensor(float(self.samples), dtype=torch.float64)
        mean, variance = moments(sums[0], sums[1], count)
        advantages = ((advantages - mean) / (variance.sqrt() + 1e-8)).float()
        _, spread = moments(sums[2], sums[3], count)
        metrics.agree("explained_variance", 1.0 - sums[4] / count / spread.clamp(min=1e-8), torch.ones(()))
        names = ("obs", "action", "log_prob", "value")
        batch = {name: rollout[name] for name in names} | {"advantage": advantages, "return": returns}
        return dict(samples(batch))

    def loss(self, batch: dict[str, Any]) -> Loss:
        """The PPO loss of a part of a minibatch, as sums over its samples."""
        config = self.config
        outputs, value = self.net(self.normalizer(batch["obs"]))
        log_ratio = self.actions.log_prob(outputs, batch["action"]) - batch["log_prob"]
        policy = clipped_surrogate(log_ratio, batch["advantage"], self.clip).sum()
        error = clipped_value_loss(value, batch["value"], batch["return"], config.value_clip).sum()
        entropy = self.actions.entropy(outputs).sum()
        with torch.no_grad():
            clipped = ((log_ratio.exp() - 1.0).abs() > self.clip).sum()
            kl = kl_estimate(log_ratio).sum()
        return Loss(
            total=policy + config.value_weight * error - config.entropy_weight * entropy,
            samples=len(value),
            sums={"policy_loss": policy, "value_loss": error, "entropy": entropy, "kl": kl, "clip_fraction": clipped},
        )

    def _scaled(self, rewards: Tensor, ended: Tensor) -> Tensor:
        """Rewards [L, T, E] over the running deviation of the discounted return, this rollout's included."""
        discounted = torch.empty_like(rewards)
        for t in range(rewards.shape[1]):
            self.discounted = self.discounted * self.config.gamma + rewards[:, t]
            discounted[:, t] = self.discounted
            self.discounted = self.discounted * ~ended[:, t]
        table = RunningMoments.table(discounted.flatten(1).unsqueeze(-1))
        self.return_moments.merge(self.runtime.pool(table))
        return (rewards / self.return_moments.mean_and_std()[1]).clamp(-10.0, 10.0)

    # -- state ---------------------------------------------------------------------------------------------------------

    def policy(self) -> "PPOPolicy":
        return PPOPolicy(self.net, self.actions, self.normalizer)

    def weights(self) -> State:
        net = {f"net.{name}": tensor for name, tensor in self.net.state_dict(keep_vars=True).items()}
        return net | self.normalizer.state()

    def shared_state(self) -> State:
        return self.weights() | self.optimizer.state() | {"return_moments": self.return_moments.sums}

    def load_shared_state(self, state: State) -> None:
        copy_into(self.shared_state(), state, "the agent")
        self.normalizer.freeze()

    def lane_state(self, lane: int) -> State:
        return {"discounted": self.discounted[self.runtime.lanes.local.index(lane)]} | self.episodes.state(lane)

    def load_lane_state(self, lane: int, state: State) -> None:
        copy_into(self.lane_state(lane), state, f"lane {lane}")


class PPOPolicy:
    """The most likely action for each observation."""

    def __init__(self, net: ActorCritic, actions: Actions, normalizer: ObservationNormalizer) -> None:
        self.net, self.actions, self.normalizer = net, actions, normalizer

    def initial_memory(self, count: int) -> Tree:
        return {}

    @torch.no_grad()
    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        return self.actions.mode(self.net(self.normalizer(obs))[0]), memory


def _sums_by_lane(columns: list[Tensor]) -> Tensor:
    """Sums of columns [L, N] for each lane, [L, columns], lane by lane so that bits do not depend on L."""
    lanes = zip(*(column.double() for column in columns), strict=True)
    return torch.stack([torch.stack([column.sum() for column in lane]) for lane in lanes])
