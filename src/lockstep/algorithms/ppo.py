"""PPO: collect with the current policy, then a few epochs of clipped updates on what was collected.

Shapes: L local lanes, T horizon, E environments a lane, B = L x E local environments, lane after lane; M samples a lane
in a minibatch. A network with memory learns from sequences of S steps, and N samples are N / S of them.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.greedy_policy import GreedyPolicy
from lockstep.algorithms.ppo_benchmark import benchmark_ops
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.data.nonfinite import locate_nonfinite, value_range
from lockstep.data.rollout import (
    EpisodeStatistics,
    Rollout,
    episode_starts,
    flatten_rollout,
    minibatch_at,
    minibatches,
    sequences,
)
from lockstep.distributed import DistributedOptimizer, FusedAdam, Runtime
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics, widen
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.initialization import seeded_init
from lockstep.nn.normalization import ObservationNormalizer, RunningMeanStd
from lockstep.nn.recurrent import PaddedSegments, PieceCutter, RecurrentConfig
from lockstep.ops.functional import Scaling, Schedule, compute_gae, lr_scale, moments, ppo_loss, schedule
from lockstep.protocols import BenchmarkOp, Loss, StateDict, VecEnv
from lockstep.pytree import Tree, load_into, named_leaves, tree_map, tree_where
from lockstep.transfer import upload


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO. Every number is for the whole run, not for one process."""

    learning_rate: float = 3e-4
    """Peak learning rate; `schedule` shapes it over the run."""
    schedule: Schedule = "constant"
    """How the learning rate goes from its peak over the run."""
    warmup_fraction: float = 0.0
    """Part of the run over which the learning rate rises to its peak."""
    lr_scaling: Scaling = "none"
    """Scaling of the learning rate with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that `learning_rate` is meant for; none takes the recipe's own."""
    rollout_steps: int = 128
    """Steps each environment takes between updates."""
    batch_size: int = 2048
    """Samples of one update, over all processes."""
    epochs: int = 4
    """Passes over what was collected."""
    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 0.95
    """Trace decay of the advantage estimate."""
    clip_coef: float = 0.2
    """How far the policy's probability ratio may move in one iteration before its gradient stops."""
    clip_coef_schedule: Schedule = "constant"
    """Schedule of `clip_coef` over the run."""
    value_clip_coef: float | None = None
    """The same for values; none does not clip them."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """The gradient of the whole batch is clipped to this norm."""
    target_kl: float | None = None
    """Stop an update's epochs early when the policy has moved this far. None never stops."""
    grad_accum_steps: int = 1
    """Micro-batches a minibatch is cut into; lowers memory, changes nothing else."""
    adam_eps: float = 1e-5
    """Adam's denominator offset."""
    normalize_obs: bool = False
    """Shift and scale observations by their running moments."""
    normalize_rewards: bool = False
    """Scale rewards by the running deviation of the discounted return."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    """Shape of the network."""
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig)
    """What the network remembers between steps."""
    bptt_steps: int | None = None
    """Steps of the sequences that a network with memory learns from, which must divide the horizon; none takes all."""

    def validate(self, task: Any, run: RunConfig) -> None:
        """Refuse numbers that do not divide, in words, before any process starts."""
        if self.rollout_steps < 1:
            raise ConfigError(f"rollout_steps is {self.rollout_steps}.", "Take at least one step between updates.")
        if self.length < 1 or self.rollout_steps % self.length:
            raise ConfigError(
                f"bptt_steps is {self.length}, which does not divide a rollout_steps of {self.rollout_steps}.",
                "Use --algo.bptt-steps none to learn from all of it.",
            )
        rollout, lanes = task.num_envs * self.rollout_steps, resolve_lanes(run, 1).lanes or 0
        Lanes(lanes, range(0), run.seed).per_lane(task.num_envs, "num_envs")
        unit = lanes * self.length
        if self.batch_size % unit:
            below = max(unit, self.batch_size - self.batch_size % unit)
            what = f"{lanes} lanes" if self.length == 1 else f"{lanes} lanes with sequences of {self.length} steps"
            raise ConfigError(
                f"batch_size is {self.batch_size}, which {what} cannot share evenly.",
                f"Use {below} or {below + unit}.",
            )
        if rollout % self.batch_size:
            fits = [size for size in range(unit, rollout + 1, unit) if rollout % size == 0]
            near = min(fits, key=lambda size: abs(size - self.batch_size), default=rollout)
            raise ConfigError(
                f"an iteration collects {task.num_envs} x {self.rollout_steps} = {rollout} samples, "
                f"which minibatches of {self.batch_size} do not divide.",
                f"Use --algo.batch-size {near}, or change --task.num-envs or --algo.rollout_steps.",
            )

    @property
    def length(self) -> int:
        """S: steps that are learned from together; without memory, every step stands for itself."""
        return 1 if self.recurrent.kind == "none" else self.bptt_steps or self.rollout_steps

    def samples_per_iteration(self, task: Any) -> int:
        return int(task.num_envs * self.rollout_steps)

    def build(self, task: VecEnv, runtime: Runtime) -> "PPO":
        return PPO(self, task, runtime)


class PPO:
    """One agent learning by PPO."""

    def __init__(self, config: PPOConfig, task: VecEnv, runtime: Runtime) -> None:
        self.config, self.task, self.runtime = config, task, runtime
        lanes = runtime.lanes
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.num_lanes * self.envs * config.rollout_steps
        self.actions = make_distribution(task.action_space)
        with seeded_init(lanes.shared_stream("ppo.init")):
            self.net = ActorCritic(task.observation_space, self.actions, config.encoder, config.recurrent)
            self.net.to(runtime.device)
        rate = FusedAdam(self.net.named_parameters(), lr=config.learning_rate, eps=config.adam_eps)
        varying = (
            "" if config.recurrent.kind == "none" else "sequences are cut where episodes end, so their shapes vary"
        )
        self.optimizer = DistributedOptimizer(
            runtime, rate, max_grad_norm=config.max_grad_norm, accumulate=config.grad_accum_steps, not_compiled=varying
        )
        self.noise, self.shuffle = lanes.streams("ppo.noise"), lanes.streams("ppo.shuffle")
        self.normalizer = ObservationNormalizer(task.reset(), config.normalize_obs)
        self.return_moments = RunningMeanStd(1, runtime.device)
        self.discounted = torch.zeros(len(lanes), self.envs, device=runtime.device)  # [L, E], for reward scaling
        self.episodes = EpisodeStatistics(lanes.local, self.envs, runtime.device)
        self.rollout, self.outcomes = Rollout(config.rollout_steps), Rollout(config.rollout_steps)
        self.memory = self.net.initial_state(task.num_envs)  # [B, ...], before the step that comes next
        self.initial_state = self.net.initial_state(1)
        self.memories = Rollout(config.rollout_steps // config.length)  # the same at the start of each sequence
        self.truncation_values = torch.zeros(
            config.rollout_steps, task.num_envs, device=runtime.device
        )  # read where truncated
        self.clip: float | Tensor = config.clip_coef
        if runtime.compilation.mode != "off":  # a compiled update reads it where it is
            self.clip = torch.full((), config.clip_coef, device=runtime.device)
        self._cut = PieceCutter(runtime.device)
        self._pieces: PaddedSegments | None = None
        """How the sequences of the minibatch under way are cut, where the host worked it out ahead."""
        # Asked with the environments of the whole run: how many processes share them decides nothing.
        self.acting = nullcontext if self.net.prefers_fp32(lanes.num_lanes * self.envs) else runtime.autocast
        self._act = runtime.compilation(self._act_on, "acting")
        self._value = runtime.compilation(self._value_of, "a value")

    @property
    def updates(self) -> int:
        return int(self.optimizer.updates)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        runtime, rollout, outcomes = self.runtime, self.rollout, self.outcomes
        shape, device = (self.config.rollout_steps, self.envs), runtime.device
        noise = self.actions.sample_noise(self.noise, clock.iteration, *shape, device=device)  # [L, T, E, ...]
        noise = noise.transpose(0, 1).flatten(1, 2)  # [T, B, ...]
        obs = self.task.observations()
        for t, draws in enumerate(noise.unbind(0)):
            with runtime.phase("act"):
                if self.memory and t % self.config.length == 0:
                    self.memories.write(t // self.config.length, {"memory": self.memory})
                acted = runtime.map_lanes(self._act, {"obs": obs, "noise": draws, "memory": self.memory})
                memory = acted.pop("memory")
                rollout.write(t, {"obs": obs, **acted})
            with runtime.phase("env"):
                step = self.task.step(acted["action"])
            outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
            outcomes.write(t, {**outcome, **step.episode_info})
            if step.any_truncated:
                # What was cut off goes on in value from its last observation, not from the next episode's first.
                self.truncation_values[t] = runtime.map_lanes(self._value, {"obs": step.final_obs, "memory": memory})
            obs, self.memory = step.obs, tree_where(step.terminated | step.truncated, self.initial_state, memory)
        self.last_value = runtime.map_lanes(self._value, {"obs": obs, "memory": self.memory})  # [B]
        ended = outcomes["terminated"] | outcomes["truncated"]
        return self.episodes.count(outcomes["reward"], ended, {name: outcomes[name] for name in step.episode_info})

    def _act_on(self, part: dict[str, Any]) -> Tree:
        with self.acting():
            outputs, value, memory = self.net.step(self.normalizer(part["obs"]), part["memory"])
        action = self.actions.sample(outputs, part["noise"])
        return {"action": action, "outputs": outputs, "value": value, "memory": memory}

    def _value_of(self, part: dict[str, Any]) -> Tensor:
        with self.acting():
            return self.net.value(self.normalizer(part["obs"]), part["memory"])

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: TrainState) -> Metrics:
        """Learn from the rollout just collected."""
        config = self.config
        factor = lr_scale(config.lr_scaling, config.batch_size, config.reference_batch_size)
        warmup = config.warmup_fraction or (0.05 if factor > 1.0 else 0.0)
        rate = schedule(config.schedule, config.learning_rate * factor, clock.progress, warmup)
        clip = schedule(config.clip_coef_schedule, config.clip_coef, clock.progress)
        self.clip = self.clip.fill_(clip) if isinstance(self.clip, Tensor) else clip
        metrics = Metrics()
        batch = self._prepare_batch(metrics)
        if not batch:
            return self._skip_rollout(clock)
        rows = self._in_sequences(batch) if self.memory else batch
        # On a device the host cuts sequences ahead of each step: there it would have to wait for how many there are.
        ahead = bool(self.memory) and self.runtime.device.type != "cpu" and not self.runtime.exact
        starts = rows["starts"].cpu() if ahead and config.grad_accum_steps == 1 else None
        per_lane = config.batch_size // self.runtime.lanes.num_lanes // config.length
        count = config.rollout_steps // config.length * self.envs  # rows of a lane
        for epoch in range(config.epochs):
            counter = clock.iteration * config.epochs + epoch
            order = self.shuffle.permutation(counter, count, device=self.runtime.device)
            parts = None
            if starts is not None:  # in the same order, which has the same bits on the host
                parts = minibatches(starts, self.shuffle.permutation(counter, count), per_lane)
            for number, minibatch in enumerate(minibatches(rows, order, per_lane)):
                where = f"iteration {clock.iteration + 1}, epoch {epoch + 1}, minibatch {number + 1}"
                self._pieces = self._cut(next(parts)) if parts is not None else None
                metrics += self.optimizer.step(
                    self.loss, minibatch, rate, where, partial(minibatch_at, rows, order, per_lane, number)
                )
            self._pieces = None  # from here on a loss may be of another batch
            if config.target_kl is not None and metrics.latest("kl") > config.target_kl:
                break
        self.optimizer.check_last_step()  # before anything else of the agent changes
        if config.normalize_obs:
            # Last, so that the first epoch sees the observations exactly as the acting policy saw them.
            seen = tree_map(lambda x: x.unflatten(0, (len(self.runtime.lanes), -1)), batch["obs"])
            self.normalizer.update(self.runtime.exact_sum(self.normalizer.batch_stats(seen)))
        return metrics

    @torch.no_grad()
    def _prepare_batch(self, metrics: Metrics) -> dict[str, Any]:
        """The rollout with its advantages and returns, as samples [L x T x E, ...]; nothing if it has bad numbers."""
        before = self.return_moments.sums.clone(), self.discounted
        config, rollout, lanes = self.config, self.rollout, len(self.runtime.lanes)
        values, terminated, truncated = rollout["value"], self.outcomes["terminated"], self.outcomes["truncated"]
        following = torch.cat([values[1:], self.last_value.unsqueeze(0)])  # [T, B]
        following = torch.where(truncated, self.truncation_values, following)
        ended = terminated | truncated
        rewards = (
            self._normalize_rewards(self.outcomes["reward"], ended)
            if config.normalize_rewards
            else self.outcomes["reward"]
        )
        advantages = compute_gae(rewards, values, following, terminated, ended, config.gamma, config.gae_lambda)
        returns = advantages + values
        batch = flatten_rollout(rollout.buffers | {"advantage": advantages, "return": returns}, lanes)
        advantages, returns = batch["advantage"], batch["return"]
        columns = [advantages, advantages.square(), returns, returns.square(), (returns - batch["value"]).square()]
        # Lane by lane, so that the bits of a lane's sums do not depend on who else lives here.
        table = widen(torch.stack(columns, dim=1)).chunk(lanes)  # [T x E, 5] each
        # The observations' extent goes along: sums are finite only if all they are made of is, here and elsewhere.
        seen = upload(value_range(rollout["obs"]), self.runtime.device).expand(lanes, 1)
        sums = self.runtime.exact_sum(torch.cat([torch.stack([lane.sum(0) for lane in table]), seen], dim=1))
        if not sums.isfinite().all():
            self.return_moments.sums.copy_(before[0])
            self.discounted = before[1]
            return {}
        count = torch.tensor(float(self.samples), dtype=torch.float64)
        mean, variance = moments(sums[0], sums[1], count)
        batch["advantage"] = ((advantages - mean) / (variance.sqrt() + 1e-8)).float()
        _, spread = moments(sums[2], sums[3], count)
        metrics.add_global("explained_variance", 1.0 - sums[4] / count / spread.clamp(min=1e-8), 1.0)
        # The acting policy's log probabilities: here all at once, not in every step of the rollout.
        batch["log_prob"] = self.runtime.map_lanes(
            lambda part: self.actions.log_prob_and_entropy(part["outputs"], part["action"])[0],
            {name: batch[name] for name in ("outputs", "action")},
        )
        del batch["outputs"]
        return dict(batch)

    def _in_sequences(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Samples as sequences [L x T/S x E, S, ...], with the memory before each and where in it episodes started."""
        lanes, outcomes = len(self.runtime.lanes), self.outcomes
        steps = batch | {
            "starts": flatten_rollout(episode_starts(outcomes["terminated"] | outcomes["truncated"]), lanes)
        }
        rows = sequences(steps, lanes, self.config.rollout_steps, self.config.length)
        return dict(rows | {"memory": flatten_rollout(self.memories["memory"], lanes)})

    def _skip_rollout(self, clock: TrainState) -> Metrics:
        """Stop at a rollout with bad numbers, or learn nothing from all of it: of the agent nothing changes."""
        outcomes, lanes = self.outcomes, self.runtime.lanes.local
        # With what followed the last step, whose value belongs to this rollout.
        obs = tree_map(
            lambda past, now: torch.cat([past, now.unsqueeze(0)]), self.rollout["obs"], self.task.observations()
        )
        values = torch.cat([self.rollout["value"], self.last_value.unsqueeze(0)])
        cut = torch.where(outcomes["truncated"], self.truncation_values, 0.0)
        given, made = {"observation": obs, "reward": outcomes["reward"]}, {"value": values, "value at a cut": cut}
        self.optimizer.nonfinite_policy.handle(
            f"iteration {clock.iteration + 1}, before update {self.updates + 1}, has a rollout that is not finite:",
            locate_nonfinite(given, lanes) or locate_nonfinite(made, lanes),
            "Mend the environment, or use --run.on-nonfinite skip to leave such iterations out.",
            {"rollout": self.rollout.buffers | self.outcomes.buffers | {"last_obs": self.task.observations()}},
        )
        metrics, updates = Metrics(), torch.tensor(self.config.epochs * self.samples // self.config.batch_size)
        metrics.add_global("skipped", updates, updates)
        return metrics

    def loss(self, batch: dict[str, Any]) -> Loss:
        """The PPO loss of a part of a minibatch, as sums over its samples."""
        config, memory, starts = self.config, batch.get("memory"), batch.get("starts")
        if starts is not None:
            steps = {name: part for name, part in batch.items() if name != "memory"}
            batch = tree_map(lambda x: x.flatten(0, 1), steps)
        outputs, value = self.net(self.normalizer(batch["obs"]), memory, starts, self._pieces)
        log_prob, entropy = self.actions.log_prob_and_entropy(outputs, batch["action"])
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
        return Loss(loss.total, num_samples=len(value), metric_sums=dict(zip(names, loss[1:], strict=True)))

    def _normalize_rewards(self, rewards: Tensor, ended: Tensor) -> Tensor:
        """Rewards [T, B] over the running deviation of the discounted return, this rollout's included."""
        discounted = torch.empty_like(rewards)
        running = self.discounted.flatten()
        for t in range(len(rewards)):
            running = running * self.config.gamma + rewards[t]
            discounted[t] = running
            running = running * ~ended[t]
        self.discounted = running.view_as(self.discounted)
        lanes = len(self.runtime.lanes)
        table = RunningMeanStd.batch_stats(flatten_rollout(discounted, lanes).view(lanes, -1, 1))
        self.return_moments.update(self.runtime.exact_sum(table))
        return (rewards / self.return_moments.mean_and_std()[1]).clamp(-10.0, 10.0)

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        return benchmark_ops(self, fewer)

    def sample_buffers(self) -> Tree:
        kept = {"rollout": self.rollout, "outcomes": self.outcomes, "memories": self.memories}
        return {name: rollout.buffers for name, rollout in kept.items()} | {"cut_values": self.truncation_values}

    # -- state ---------------------------------------------------------------------------------------------------------

    def policy(self) -> GreedyPolicy:
        return GreedyPolicy(self.net, self.actions, self.normalizer)

    def model_state_dict(self) -> StateDict:
        net = {f"net.{name}": tensor for name, tensor in self.net.state_dict(keep_vars=True).items()}
        return net | self.normalizer.state()

    def shared_state(self) -> StateDict:
        return self.model_state_dict() | self.optimizer.state() | {"return_moments": self.return_moments.sums}

    def load_shared_state(self, state: StateDict) -> None:
        load_into(self.shared_state(), state, "the agent")
        self.normalizer.freeze()

    def lane_state(self, lane: int) -> StateDict:
        place = self.runtime.lanes.local.index(lane)
        memory = tree_map(lambda x: x.unflatten(0, (-1, self.envs))[place], self.memory)
        return {"discounted": self.discounted[place], **named_leaves(memory, "memory")} | self.episodes.state(lane)

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        load_into(self.lane_state(lane), state, f"lane {lane}")
