"""TD-MPC2: a world model learns from replay to foresee rewards and values, and actions are planned in it.

Every update takes one step of the model and one of the policy, which learns from the latents that the model's step went
through. What the policy's values are divided by is measured on the whole batch of the run, before its step.

Shapes: L local lanes, E environments a lane, B = L x E, M samples a lane in a batch, N = L x M samples (or M in exact
mode, where a lane comes after another), H steps ahead, K action features, Z of a latent, R rounds of a plan.
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from lockstep.algorithms.tdmpc2.benchmark import benchmark_ops
from lockstep.algorithms.tdmpc2.losses import LossConfig, judge_policy, model_loss, policy_loss
from lockstep.algorithms.tdmpc2.mppi import (
    PlanConfig,
    Planner,
    PlanningPolicy,
    PriorPolicy,
    draw,
    sample_critic_pairs,
    seen_of,
    shift_mean,
)
from lockstep.algorithms.tdmpc2.world_model import WorldModel, WorldModelConfig
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.data.replay_buffer import Replay, ReplayConfig, add_rollout, outcome
from lockstep.data.rollout import EpisodeStatistics, Rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam, Runtime
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.nn.initialization import seeded_init
from lockstep.ops.functional import discount_from_episode_length, percentile_range
from lockstep.protocols import BenchmarkOp, LaneState, Loss, StateDict, SubtaskSpec, VecEnv
from lockstep.pytree import Tree, load_into


@dataclass(frozen=True, kw_only=True)
class TDMPC2Config:
    """Settings of TD-MPC2. Every number is for the whole run, not for one process."""

    learning_rate: float = 3e-4
    """Of all networks."""
    encoder_lr_scale: float = 0.3
    """What it is multiplied by for the encoder."""
    batch_size: int = 256
    """Stretches of `horizon` steps in one update, over all processes."""
    buffer_size: int = 1_000_000
    """Samples that replay holds."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Where replay is kept."""
    seed_samples: int = 2_500
    """Samples with random actions before learning starts; the updates that they owe are then taken at once."""
    rollout_steps: int = 1
    """Steps each environment takes between updates."""
    updates_per_sample: float = 1.0
    """Updates for each sample."""
    horizon: int = 3
    """Steps that are foreseen, in learning and in planning."""
    gamma: float | None = None
    """Discount of future rewards; none: by the length of a task's episodes, 0.99 for 500 steps."""
    episodic: bool = False
    """Whether episodes may end for good, so that ends are to be foreseen; the control suite's only run out of time."""
    tau: float = 0.01
    """How far targets and the scale of values move in each update."""
    max_grad_norm: float = 20.0
    """Gradients of the whole batch are clipped to this norm; those of model and policy apart."""
    grad_accum_steps: int = 1
    """Parts in which a batch is learned from, to save memory; one step is taken for all of them."""
    mpc: bool = True
    """Whether actions are planned; else they are the policy's own, with its noise."""
    loss: LossConfig = field(default_factory=LossConfig)
    """What each error counts."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """How hard to think about an action."""
    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    """Shape of the networks."""

    def validate(self, task: Any, run: RunConfig) -> None:
        """Refuse numbers that do not divide, in words, before any process starts."""
        lanes = resolve_lanes(run, 1).lanes or 0
        Lanes(lanes, range(0), run.seed).per_lane(task.num_envs, "num_envs")
        Lanes(lanes, range(0), run.seed).per_lane(self.batch_size, "batch_size")
        self.model.shape()
        self.plan.validate()
        tasks = getattr(task, "num_tasks", 1)
        if task.num_envs % tasks:
            raise ConfigError(
                f"num_envs is {task.num_envs}, which {tasks} tasks cannot share evenly.",
                f"Use a number that {tasks} tasks and {lanes} lanes both divide, or other --run.lanes.",
            )
        if (
            min(self.horizon, self.rollout_steps, self.grad_accum_steps) < 1
            or self.updates_per_sample <= 0
            or not 0 < self.tau <= 1
        ):
            raise ConfigError(
                f"horizon is {self.horizon}, rollout_steps {self.rollout_steps}, grad_accum_steps "
                f"{self.grad_accum_steps}, updates_per_sample "
                f"{self.updates_per_sample} and tau {self.tau}.",
                "Use 1 or more of the first three, and more than 0 of the others; tau is 1 at most.",
            )
        if not task.num_envs * self.horizon <= self.seed_samples <= self.buffer_size:
            raise ConfigError(
                f"seed_samples is {self.seed_samples}, and replay holds {self.buffer_size} samples of {task.num_envs} "
                f"environments, of which {self.horizon} steps are foreseen.",
                f"Start to learn after {task.num_envs * self.horizon} samples or more, and before replay is full.",
            )

    def samples_per_iteration(self, task: Any) -> int:
        return int(task.num_envs * self.rollout_steps)

    def updates_until(self, samples: int) -> int:
        """Updates that are due when so many samples have been taken: a function of the clock, so a resume owes none."""
        return int(samples * self.updates_per_sample) if samples >= self.seed_samples else 0

    def build(self, task: VecEnv, runtime: Runtime) -> "TDMPC2":
        return TDMPC2(self, task, runtime)


class TDMPC2:
    """One world model, its policy and its critics."""

    def __init__(self, config: TDMPC2Config, task: VecEnv, runtime: Runtime) -> None:
        self.config, self.task, self.runtime = config, task, runtime
        lanes, device = runtime.lanes, runtime.device
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.num_lanes * self.envs * config.rollout_steps
        self.share = config.batch_size // lanes.num_lanes
        if not isinstance(task.action_space, Box) or not task.action_space.is_bounded():
            raise ConfigError(f"actions of {task.action_space} are not supported.", "TD-MPC2 acts in a bounded Box.")
        bounds = torch.from_numpy(task.action_space.low), torch.from_numpy(task.action_space.high)
        self.middle, self.reach = ((bounds[1] + bounds[0]) / 2).to(device), ((bounds[1] - bounds[0]) / 2).to(device)
        parts = getattr(task, "parts", ())
        actions = tuple(part.actions for part in parts) or (int(task.action_space.shape[0]),)
        space = task.observation_space["obs"] if isinstance(task.observation_space, Dict) else task.observation_space
        with seeded_init(lanes.shared_stream("tdmpc2.init")):
            self.model = WorldModel(config.model, space, actions, config.episodic).to(device)
        self.targets = copy.deepcopy(self.model.critics).requires_grad_(False)
        self.scale = torch.ones(1, device=device)
        self.discounts = torch.tensor(_discounts(config, parts), device=device)
        self.planner = Planner(self.model, config.plan, config.horizon, self.discounts)
        self.model_optimizer, self.policy_optimizer = self._optimizers()
        self.acting, self.choosing = lanes.streams("tdmpc2.acting"), lanes.streams("tdmpc2.choosing")
        self.noise, self.forgetting = lanes.streams("tdmpc2.noise"), lanes.streams("tdmpc2.forgetting")
        self.pairing = lanes.shared_stream("tdmpc2.pairs")
        self.plan_pairing = lanes.shared_stream("tdmpc2.plan_pairs")
        self.pairs = torch.zeros(2, 2, dtype=torch.int64, device=device)
        """The two critics that targets are made of, and the two that the policy asks, in the update under way."""
        self.latents = torch.zeros(len(lanes) * self.share, config.horizon + 1, self.model.latent, device=device)
        """What the model's last step went through, from which the policy learns."""
        self.episodes = EpisodeStatistics(lanes.local, self.envs, runtime.device)
        self.plans = torch.zeros(task.num_envs, config.horizon, self.model.actions, device=device)  # [B, H, K]
        self.rollout, self.outcomes, self.told = (Rollout(config.rollout_steps) for _ in range(3))
        obs, ended = task.reset(), torch.zeros(task.num_envs, dtype=torch.bool)
        example = {"obs": obs, "action": torch.zeros(task.num_envs, self.model.actions)}
        example |= {"reward": torch.zeros(task.num_envs), "terminated": ended, "truncated": ended, "next_obs": obs}
        self.replay = Replay(config.buffer_size, lanes, example, "tdmpc2.replay", config.replay, runtime.device)
        self._plan = runtime.compilation(self._plan_for, "planning")
        self._prior = runtime.compilation(self._follow_policy, "acting")
        self._judge = runtime.compilation(self._value_of, "the policy's value")
        self._update_targets = runtime.compilation(self._move_targets, "moving targets")

    def _optimizers(self) -> tuple[DistributedOptimizer, DistributedOptimizer]:
        """One for the model and one for its policy: neither moves what is the other's."""
        config, names = self.config, list(self.model.named_parameters())
        encoder = [(name, p) for name, p in names if name.startswith("encoder.")]
        policy = [(name, p) for name, p in names if name.startswith("policy.")]
        rest = [(name, p) for name, p in names if not name.startswith(("encoder.", "policy."))]
        groups: list[dict[str, Any]] = [{"params": rest}]
        groups.append({"params": encoder, "lr": config.learning_rate * config.encoder_lr_scale})
        options: dict[str, Any] = {"max_grad_norm": config.max_grad_norm, "accumulate": config.grad_accum_steps}
        model = FusedAdam(groups, lr=config.learning_rate)
        own = FusedAdam(policy, lr=config.learning_rate, eps=1e-5)
        return DistributedOptimizer(self.runtime, model, **options), DistributedOptimizer(self.runtime, own, **options)

    @property
    def updates(self) -> int:
        return int(self.model_optimizer.updates)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `collect` steps in every environment."""
        config, runtime = self.config, self.runtime
        for t in range(config.rollout_steps):
            obs = self.task.observations()
            with runtime.phase("act"):
                action = self._act(obs, clock.iteration * config.rollout_steps + t)
                self.rollout.write(t, {"obs": obs, "action": action})  # before the step, which reuses their memory
            with runtime.phase("env"):
                step = self.task.step(action * self.reach + self.middle)
            ended = (step.terminated | step.truncated).to(runtime.device)
            self.plans.masked_fill_(ended[:, None, None], 0.0)
            self.outcomes.write(t, outcome(step))
            self.told.write(t, {"earned": step.reward, **step.episode_info})
        over = self.outcomes["terminated"] | self.outcomes["truncated"]
        return self.episodes.count(self.told["earned"], over, {name: self.told[name] for name in step.episode_info})

    def _act(self, obs: Tree, counter: int) -> Tensor:
        """Actions [B, K]: any at first, then planned, or the policy's own."""
        config, device = self.config, self.runtime.device
        if self.replay.count < config.seed_samples:
            chance = self.acting.uniform(counter, self.envs, self.model.actions, device=device).flatten(0, 1)
            return (2.0 * chance - 1.0) * self.model.mask(seen_of(obs)[1])
        if not config.mpc:
            chance = self.acting.normal(counter, self.envs, self.model.actions, device=device).flatten(0, 1)
            done: Tensor = self.runtime.map_lanes(self._prior, {"obs": obs, "noise": chance})
            return done
        noise = self.plan_noise(counter)
        pairs = sample_critic_pairs(self.plan_pairing, counter, self.planner.rounds, self.model.critics.count, device)
        planned = self.runtime.map_lanes(
            lambda part: self._plan(part, pairs), {"obs": obs, "plan": self.plans, "noise": noise}
        )
        self.plans.copy_(planned["mean"])
        return planned["action"]

    def _plan_for(self, part: dict[str, Any], pairs: Tensor) -> Tree:
        with self.runtime.autocast():
            action, mean = self.planner.plan(
                *seen_of(part["obs"]), shift_mean(part["plan"]), part["noise"], pairs, explore=True
            )
        return {"action": action, "mean": mean}

    def plan_noise(self, counter: int) -> dict[str, Any]:
        config, actions, device = self.config, self.model.actions, self.runtime.device
        return draw(self.acting, self.choosing, counter, self.envs, config.plan, config.horizon, actions, device)

    def _follow_policy(self, part: dict[str, Any]) -> Tensor:
        obs, task = seen_of(part["obs"])
        with self.runtime.autocast():
            return self.model.act(self.model.encode(obs, task), part["noise"], task).action

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: TrainState) -> Metrics:
        """Remember what was collected, then take the updates that are due."""
        config, model, policy, metrics = self.config, Metrics(), Metrics(), Metrics()
        if not add_rollout(self.replay, self.rollout, self.outcomes, self.model_optimizer, clock):
            return metrics
        due = config.updates_until(clock.samples + self.samples) - config.updates_until(clock.samples)
        for number in range(due):
            counter, where = self.updates, f"iteration {clock.iteration + 1}, batch {number + 1} of {due}"
            batch = self._sample_batch(counter)
            model += self.model_optimizer.step(
                self.model_loss, batch, where=where, rebuild=partial(self._sample_batch, counter)
            )
            self.model.shorten_tasks()
            seen = self._seen(batch)
            self._rescale(seen)
            again = partial(self._seen_again, counter)
            policy += self.policy_optimizer.step(self.policy_loss, seen, where=where, rebuild=again)
            self._update_targets()
        self.model_optimizer.check_last_step()
        self.policy_optimizer.check_last_step()
        metrics += model.with_prefix("model")
        metrics += policy.with_prefix("policy")
        metrics.add_global("scale", self.scale.detach()[0], 1.0)
        return metrics

    def with_chance(self, batch: dict[str, Any], counter: int) -> dict[str, Any]:
        """Stretches [L x M, ...] with all that is left to chance in an update."""
        config, count = self.config, self.share
        critics, actions, device = self.model.critics.count, self.model.actions, self.runtime.device
        batch["obs"], task = seen_of(batch["obs"])
        if task is not None:
            batch["task"] = task[:, 0]
        batch["row"], batch["whole"] = torch.arange(len(self.latents), device=device), batch["whole"].float()
        steps, more = config.horizon, config.horizon + 1
        noise = self.noise.normal(counter, count, steps + more, actions, device=device).flatten(0, 1)
        batch["target"], batch["policy"] = noise.split((steps, more), dim=1)
        if config.model.dropout:
            sizes, width = (critics * steps, 2 * more), config.model.shape().width
            dropped = self.forgetting.bernoulli_sparse(
                counter, config.model.dropout, count, sum(sizes), width, device=device
            )
            kept = ~dropped.flatten(0, 1)
            own, other = kept.split(sizes, dim=1)
            batch["kept"], batch["policy_kept"] = own.unflatten(1, (critics, steps)), other.unflatten(1, (2, more))
        self.pairs.copy_(sample_critic_pairs(self.pairing, counter, 2, critics, device))
        return batch

    def _sample_batch(self, counter: int) -> dict[str, Any]:
        return self.with_chance(self.replay.slices(counter, self.share, self.config.horizon), counter)

    def _seen(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What the policy learns from in an update, after the model's step on a batch."""
        names = ("task", "whole", "policy", "policy_kept")
        return {"z": self.latents} | {name: batch[name] for name in names if name in batch}

    @torch.no_grad()
    def _seen_again(self, counter: int) -> dict[str, Any]:
        """The same for an update that was made before, with the latents that the model now has for its batch."""
        batch = self._sample_batch(counter)
        self.model_loss(batch)
        return self._seen(batch)

    def model_loss(self, batch: dict[str, Any]) -> Loss:
        result, latents = model_loss(self.model, self.targets, self.discounts, self.pairs[0], self.config.loss, batch)
        self.latents.index_copy_(0, batch["row"], latents.float())  # by row, in whatever parts a batch comes
        return result

    def policy_loss(self, batch: dict[str, Any]) -> Loss:
        """The optimizer moves nothing but the policy by it."""
        return policy_loss(self.model, self.scale, self.pairs[1], self.config.loss, batch)

    @torch.no_grad()
    def _rescale(self, batch: dict[str, Any]) -> None:
        """Move the scale of values to the spread of those that the policy is about to learn from, of all lanes."""
        first = {name: x[:, :1] if name in ("z", "policy") else x for name, x in batch.items()}
        if "policy_kept" in batch:
            first["policy_kept"] = batch["policy_kept"][:, :, :1]
        lanes = self.runtime.lanes
        everybody = torch.zeros(lanes.num_lanes, self.share, device=self.runtime.device)
        values = self.runtime.map_lanes(self._judge, first)
        everybody[lanes.local.start : lanes.local.stop] = values.view(len(lanes), self.share)
        spread = percentile_range(
            self.runtime.all_reduce_sum(everybody).flatten()
        )  # each is somebody's own, and adding zero is exact
        # A spread that is not finite leaves the scale alone, on every process: the optimizer reports it.
        self.scale.lerp_(torch.where(spread.isfinite(), spread, self.scale), self.config.tau)

    def _value_of(self, part: dict[str, Any]) -> Tensor:
        with self.runtime.autocast():
            return judge_policy(self.model, self.pairs[1], part)[1].flatten().float()

    @torch.no_grad()
    def _move_targets(self) -> None:
        """Move targets a little towards what was learned."""
        torch._foreach_lerp_(list(self.targets.parameters()), list(self.model.critics.parameters()), self.config.tau)

    # -- what it is made of --------------------------------------------------------------------------------------------

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        return benchmark_ops(self, fewer)

    def sample_buffers(self) -> Tree:
        rollouts = self.rollout.buffers | self.outcomes.buffers | self.told.buffers
        return {"rollout": rollouts, "replay": self.replay.buffers}

    def policy(self) -> PlanningPolicy | PriorPolicy:
        if not self.config.mpc:
            return PriorPolicy(self.model, self.middle, self.reach)
        return PlanningPolicy(self.planner, self.middle, self.reach)

    def model_state_dict(self) -> StateDict:
        nets = {"model": self.model, "targets": self.targets}
        return {f"{n}.{name}": x for n, net in nets.items() for name, x in net.state_dict(keep_vars=True).items()}

    def shared_state(self) -> StateDict:
        optimizers = self.model_optimizer.state("model_optimizer") | self.policy_optimizer.state("policy_optimizer")
        return self.model_state_dict() | {"scale": self.scale} | optimizers

    def load_shared_state(self, state: StateDict) -> None:
        load_into(self.shared_state(), state, "the agent")

    def lane_state(self, lane: int) -> LaneState:
        replay = {f"replay.{name}": value for name, value in self.replay.lane_state(lane).items()}
        return {**self._own(lane), **replay}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        replay = {name: tensor for name, tensor in state.items() if name.startswith("replay.")}
        rest = {name: tensor for name, tensor in state.items() if name not in replay}
        self.replay.load_lane_state(lane, {name.removeprefix("replay."): x for name, x in replay.items()})
        load_into(self._own(lane), rest, f"lane {lane}")

    def _own(self, lane: int) -> StateDict:
        """What a lane owns beside replay: its episodes, and the plans to go on from."""
        plans = self.plans.unflatten(0, (-1, self.envs))[self.runtime.lanes.local.index(lane)]
        return {**self.episodes.state(lane), "plans": plans}


def _discounts(config: TDMPC2Config, parts: tuple[SubtaskSpec, ...]) -> list[float]:
    """The discount of each task."""
    if config.gamma is None and not parts:
        raise ConfigError("the length of this task's episodes is not known.", "Give a discount: --algo.gamma 0.99.")
    if config.gamma is not None:
        return [config.gamma] * max(1, len(parts))
    return [discount_from_episode_length(part.length) for part in parts]
