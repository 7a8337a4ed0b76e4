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

from lockstep.algorithms.ppo_engine import bare_works
from lockstep.config import ConfigError, RunConfig, with_lanes
from lockstep.data.finite import bad_places, extent
from lockstep.data.rollout import Episodes, Rollout, minibatch_at, minibatches, samples, sequences, starts_of
from lockstep.functional import Scaling, Schedule, batch_factor, generalized_advantages, moments, ppo_loss, schedule
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics, widen
from lockstep.nets.actions import Actions, build_actions
from lockstep.nets.actor_critic import ActorCritic
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.init import initialising
from lockstep.nets.memory import MemoryConfig, PieceCutter, Pieces
from lockstep.nets.normalizer import ObservationNormalizer, RunningMoments
from lockstep.protocols import Clock, Loss, State, VecEnv, Work
from lockstep.runtime import Adam, Optimizer, Runtime
from lockstep.transfer import upload
from lockstep.trees import Tree, copy_into, leaves, tree_map, tree_where


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO. Every number is for the whole run, not for one process."""

    learning_rate: float = 3e-4
    """Peak learning rate; `schedule` shapes it over the run."""
    schedule: Schedule = "constant"
    """How the learning rate goes from its peak over the run."""
    warmup: float = 0.0
    """Part of the run over which the learning rate rises to its peak."""
    lr_scaling: Scaling = "none"
    """How the learning rate follows a batch larger than `reference_batch`; what is scaled gets a warm-up of 5 %."""
    reference_batch: int | None = None
    """Batch size that `learning_rate` is meant for; none takes the recipe's own."""
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
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What the network remembers between steps."""
    sequence: int | None = None
    """Steps of the sequences that a network with memory learns from, which must divide the horizon; none takes all."""

    def check(self, task: Any, run: RunConfig) -> None:
        """Refuse numbers that do not divide, in words, before any process starts."""
        if self.horizon < 1:
            raise ConfigError(f"horizon is {self.horizon}.", "Take at least one step between updates.")
        if self.length < 1 or self.horizon % self.length:
            raise ConfigError(
                f"sequence is {self.length}, which does not divide a horizon of {self.horizon}.",
                "Use --algo.sequence none to learn from all of it.",
            )
        rollout, lanes = task.num_envs * self.horizon, with_lanes(run, 1).lanes or 0
        Lanes(lanes, range(0), run.seed).share(task.num_envs, "num_envs")
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
                f"an iteration collects {task.num_envs} x {self.horizon} = {rollout} samples, "
                f"which minibatches of {self.batch_size} do not divide.",
                f"Use --algo.batch-size {near}, or change --task.num-envs or --algo.horizon.",
            )

    @property
    def length(self) -> int:
        """S: steps that are learned from together; without memory, every step stands for itself."""
        return 1 if self.memory.kind == "none" else self.sequence or self.horizon

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
            self.net = ActorCritic(task.observation_space, self.actions, config.encoder, config.memory)
            self.net.to(runtime.device)
        rate = Adam(self.net.named_parameters(), lr=config.learning_rate, eps=config.adam_epsilon)
        varying = "" if config.memory.kind == "none" else "sequences are cut where episodes end, so their shapes vary"
        self.optimizer = Optimizer(
            runtime, rate, max_grad_norm=config.max_grad_norm, accumulate=config.accumulate, not_compiled=varying
        )
        self.noise, self.shuffle = lanes.streams("ppo.noise"), lanes.streams("ppo.shuffle")
        self.normalizer = ObservationNormalizer(task.reset(), config.normalize_obs)
        self.return_moments = RunningMoments(1, runtime.device)
        self.discounted = torch.zeros(len(lanes), self.envs, device=runtime.device)  # [L, E], for reward scaling
        self.episodes = Episodes(lanes.local, self.envs, runtime.device)
        self.rollout, self.outcomes = Rollout(config.horizon), Rollout(config.horizon)
        self.memory = self.net.initial_memory(task.num_envs)  # [B, ...], before the step that comes next
        self.fresh = self.net.initial_memory(1)
        self.memories = Rollout(config.horizon // config.length)  # the same at the start of each sequence
        self.cut_values = torch.zeros(config.horizon, task.num_envs, device=runtime.device)  # read where truncated
        self.clip: float | Tensor = config.clip
        if runtime.compilation.mode != "off":  # a compiled update reads it where it is
            self.clip = torch.full((), config.clip, device=runtime.device)
        self._cut = PieceCutter(runtime.device)
        self._pieces: Pieces | None = None
        """How the sequences of the minibatch under way are cut, where the host worked it out ahead."""
        # Asked with the environments of the whole run: how many processes share them decides nothing.
        self.acting = nullcontext if self.net.faster_in_full(lanes.count * self.envs) else runtime.autocast
        self._act = runtime.compilation(self._act_on, "acting")
        self._value = runtime.compilation(self._value_of, "a value")

    @property
    def updates(self) -> int:
        return int(self.optimizer.updates)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: Clock) -> Metrics:
        """Take `horizon` steps in every environment."""
        runtime, rollout, outcomes = self.runtime, self.rollout, self.outcomes
        shape, device = (self.config.horizon, self.envs), runtime.device
        noise = self.actions.noise(self.noise, clock.iteration, *shape, device=device)  # [L, T, E, ...]
        noise = noise.transpose(0, 1).flatten(1, 2)  # [T, B, ...]
        obs = self.task.observe()
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
            outcomes.write(t, {**outcome, **step.episode})
            if step.cut:
                # What was cut off goes on in value from its last observation, not from the next episode's first.
                self.cut_values[t] = runtime.map_lanes(self._value, {"obs": step.final_obs, "memory": memory})
            obs, self.memory = step.obs, tree_where(step.terminated | step.truncated, self.fresh, memory)
        self.last_value = runtime.map_lanes(self._value, {"obs": obs, "memory": self.memory})  # [B]
        ended = outcomes["terminated"] | outcomes["truncated"]
        return self.episodes.count(outcomes["reward"], ended, {name: outcomes[name] for name in step.episode})

    def _act_on(self, part: dict[str, Any]) -> Tree:
        with self.acting():
            outputs, value, memory = self.net.step(self.normalizer(part["obs"]), part["memory"])
        action = self.actions.sample(outputs, part["noise"])
        return {"action": action, "outputs": outputs, "value": value, "memory": memory}

    def _value_of(self, part: dict[str, Any]) -> Tensor:
        with self.acting():
            return self.net.value(self.normalizer(part["obs"]), part["memory"])

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: Clock) -> Metrics:
        """Learn from the rollout just collected."""
        config = self.config
        factor = batch_factor(config.lr_scaling, config.batch_size, config.reference_batch)
        warmup = config.warmup or (0.05 if factor > 1.0 else 0.0)
        rate = schedule(config.schedule, config.learning_rate * factor, clock.progress, warmup)
        clip = schedule(config.clip_schedule, config.clip, clock.progress)
        self.clip = self.clip.fill_(clip) if isinstance(self.clip, Tensor) else clip
        metrics = Metrics()
        batch = self._batch(metrics)
        if not batch:
            return self._leave_out(clock)
        rows = self._in_sequences(batch) if self.memory else batch
        # On a device the host cuts sequences ahead of each step: there it would have to wait for how many there are.
        ahead = bool(self.memory) and self.runtime.device.type != "cpu" and not self.runtime.exact
        starts = rows["starts"].cpu() if ahead and config.accumulate == 1 else None
        per_lane = config.batch_size // self.runtime.lanes.count // config.length
        count = config.horizon // config.length * self.envs  # rows of a lane
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
        self.optimizer.confirm()  # before anything else of the agent changes
        if config.normalize_obs:
            # Last, so that the first epoch sees the observations exactly as the acting policy saw them.
            seen = tree_map(lambda x: x.unflatten(0, (len(self.runtime.lanes), -1)), batch["obs"])
            self.normalizer.merge(self.runtime.pool(self.normalizer.table(seen)))
        return metrics

    @torch.no_grad()
    def _batch(self, metrics: Metrics) -> dict[str, Any]:
        """The rollout with its advantages and returns, as samples [L x T x E, ...]; nothing if it has bad numbers."""
        before = self.return_moments.sums.clone(), self.discounted
        config, rollout, lanes = self.config, self.rollout, len(self.runtime.lanes)
        values, terminated, truncated = rollout["value"], self.outcomes["terminated"], self.outcomes["truncated"]
        following = torch.cat([values[1:], self.last_value.unsqueeze(0)])  # [T, B]
        following = torch.where(truncated, self.cut_values, following)
        ended = terminated | truncated
        rewards = self._scaled(self.outcomes["reward"], ended) if config.normalize_rewards else self.outcomes["reward"]
        advantages = generalized_advantages(
            rewards, values, following, terminated, ended, config.gamma, config.gae_lambda
        )
        returns = advantages + values
        batch = samples(rollout.buffers | {"advantage": advantages, "return": returns}, lanes)
        advantages, returns = batch["advantage"], batch["return"]
        columns = [advantages, advantages.square(), returns, returns.square(), (returns - batch["value"]).square()]
        # Lane by lane, so that the bits of a lane's sums do not depend on who else lives here.
        table = widen(torch.stack(columns, dim=1)).chunk(lanes)  # [T x E, 5] each
        # The observations' extent goes along: sums are finite only if all they are made of is, here and elsewhere.
        seen = upload(extent(rollout["obs"]), self.runtime.device).expand(lanes, 1)
        sums = self.runtime.pool(torch.cat([torch.stack([lane.sum(0) for lane in table]), seen], dim=1))
        if not sums.isfinite().all():
            self.return_moments.sums.copy_(before[0])
            self.discounted = before[1]
            return {}
        count = torch.tensor(float(self.samples), dtype=torch.float64)
        mean, variance = moments(sums[0], sums[1], count)
        batch["advantage"] = ((advantages - mean) / (variance.sqrt() + 1e-8)).float()
        _, spread = moments(sums[2], sums[3], count)
        metrics.agree("explained_variance", 1.0 - sums[4] / count / spread.clamp(min=1e-8), 1.0)
        # The acting policy's log probabilities: here all at once, not in every step of the rollout.
        batch["log_prob"] = self.runtime.map_lanes(
            lambda part: self.actions.judge(part["outputs"], part["action"])[0],
            {name: batch[name] for name in ("outputs", "action")},
        )
        del batch["outputs"]
        return dict(batch)

    def _in_sequences(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Samples as sequences [L x T/S x E, S, ...], with the memory before each and where in it episodes started."""
        lanes, outcomes = len(self.runtime.lanes), self.outcomes
        steps = batch | {"starts": samples(starts_of(outcomes["terminated"] | outcomes["truncated"]), lanes)}
        rows = sequences(steps, lanes, self.config.horizon, self.config.length)
        return dict(rows | {"memory": samples(self.memories["memory"], lanes)})

    def _leave_out(self, clock: Clock) -> Metrics:
        """Stop at a rollout with bad numbers, or learn nothing from all of it: of the agent nothing changes."""
        outcomes, lanes = self.outcomes, self.runtime.lanes.local
        # With what followed the last step, whose value belongs to this rollout.
        obs = tree_map(lambda past, now: torch.cat([past, now.unsqueeze(0)]), self.rollout["obs"], self.task.observe())
        values = torch.cat([self.rollout["value"], self.last_value.unsqueeze(0)])
        cut = torch.where(outcomes["truncated"], self.cut_values, 0.0)
        given, made = {"observation": obs, "reward": outcomes["reward"]}, {"value": values, "value at a cut": cut}
        self.optimizer.tolerance.meet(
            f"iteration {clock.iteration + 1}, before update {self.updates + 1}, has a rollout that is not finite:",
            bad_places(given, lanes) or bad_places(made, lanes),
            "Mend the environment, or use --run.nonfinite skip to leave such iterations out.",
            {"rollout": self.rollout.buffers | self.outcomes.buffers | {"last_obs": self.task.observe()}},
        )
        metrics, updates = Metrics(), torch.tensor(self.config.epochs * self.samples // self.config.batch_size)
        metrics.agree("skipped", updates, updates)
        return metrics

    def loss(self, batch: dict[str, Any]) -> Loss:
        """The PPO loss of a part of a minibatch, as sums over its samples."""
        config, memory, starts = self.config, batch.get("memory"), batch.get("starts")
        if starts is not None:
            steps = {name: part for name, part in batch.items() if name != "memory"}
            batch = tree_map(lambda x: x.flatten(0, 1), steps)
        outputs, value = self.net(self.normalizer(batch["obs"]), memory, starts, self._pieces)
        log_prob, entropy = self.actions.judge(outputs, batch["action"])
        loss = ppo_loss(
            log_prob,
            entropy,
            value,
            *(batch[name] for name in ("log_prob", "advantage", "value", "return")),
            clip=self.clip,
            value_clip=config.value_clip,
            value_weight=config.value_weight,
            entropy_weight=config.entropy_weight,
        )
        names = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction")
        return Loss(loss.total, samples=len(value), sums=dict(zip(names, loss[1:], strict=True)))

    def _scaled(self, rewards: Tensor, ended: Tensor) -> Tensor:
        """Rewards [T, B] over the running deviation of the discounted return, this rollout's included."""
        discounted = torch.empty_like(rewards)
        running = self.discounted.flatten()
        for t in range(len(rewards)):
            running = running * self.config.gamma + rewards[t]
            discounted[t] = running
            running = running * ~ended[t]
        self.discounted = running.view_as(self.discounted)
        lanes = len(self.runtime.lanes)
        table = RunningMoments.table(samples(discounted, lanes).view(lanes, -1, 1))
        self.return_moments.merge(self.runtime.pool(table))
        return (rewards / self.return_moments.mean_and_std()[1]).clamp(-10.0, 10.0)

    def engine(self, fewer: int = 1) -> list[Work]:
        return bare_works(self, fewer)

    def buffers(self) -> Tree:
        kept = {"rollout": self.rollout, "outcomes": self.outcomes, "memories": self.memories}
        return {name: rollout.buffers for name, rollout in kept.items()} | {"cut_values": self.cut_values}

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
        place = self.runtime.lanes.local.index(lane)
        memory = tree_map(lambda x: x.unflatten(0, (-1, self.envs))[place], self.memory)
        return {"discounted": self.discounted[place], **leaves(memory, "memory")} | self.episodes.state(lane)

    def load_lane_state(self, lane: int, state: State) -> None:
        copy_into(self.lane_state(lane), state, f"lane {lane}")


class PPOPolicy:
    """The most likely action for each observation."""

    def __init__(self, net: ActorCritic, actions: Actions, normalizer: ObservationNormalizer) -> None:
        self.net, self.actions, self.normalizer = net, actions, normalizer

    def initial_memory(self, count: int) -> Tree:
        return self.net.initial_memory(count)

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        action, _, after = self.decide(obs, memory)
        return action, after

    @torch.no_grad()
    def decide(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        outputs, _, after = self.net.step(self.normalizer(obs), memory)
        return self.actions.mode(outputs), outputs, after
