"""TD-MPC2: learn a latent world model from the replay buffer, and plan actions in it with MPPI.

Hansen et al., 2023, arXiv:2310.16828.

Every update takes one step of the model and one of the policy, which learns from the latents of the model's step. The
policy loss divides values by a running scale. It is updated from the global batch before the policy step.

Shapes: L local lanes, E environments per lane, B = L x E, M samples per lane in a batch, N = L x M samples (or M in
exact mode, lane by lane), H horizon, K action features, Z latent features, R planning iterations.
"""

import copy
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor

from lockstep.algorithms.off_policy import scaled_rate
from lockstep.algorithms.tdmpc2.benchmark import benchmark_ops
from lockstep.algorithms.tdmpc2.config import TDMPC2Config as TDMPC2Config
from lockstep.algorithms.tdmpc2.config import discounts
from lockstep.algorithms.tdmpc2.losses import model_loss, policy_loss, policy_sample_and_value
from lockstep.algorithms.tdmpc2.mppi import (
    Planner,
    PlanningPolicy,
    PriorPolicy,
    sample_critic_pairs,
    shift_mean,
    split_obs,
)
from lockstep.algorithms.tdmpc2.world_model import WorldModel, encoder_space
from lockstep.base import Algorithm
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.data.episode_statistics import EpisodeStatistics
from lockstep.data.episodes import EpisodeData
from lockstep.data.replay_buffer import Replay, add_rollout, outcome
from lockstep.data.rollout import Rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.metrics import Metrics
from lockstep.ops.random_shift import random_shift
from lockstep.ops.two_hot import percentile_range
from lockstep.protocols import BenchmarkOp, Loss
from lockstep.pytree import Tree, tree_map


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
        self.discounts = torch.tensor(discounts(config, parts), device=device)
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
        self.offline_data: EpisodeData | None = None
        if config.offline.data:
            self.data_digest = self.register_state("data_digest", torch.zeros(1, dtype=torch.int64, device=device))
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
        """Take `rollout_steps` steps in every environment, unless the run still learns from data alone."""
        config, runtime = self.config, self.runtime
        if clock.samples < config.offline.samples:
            return Metrics()
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
        seeding = self.replay.count < config.seed_samples and not config.offline.samples
        if seeding and config.seed_policy == "random":
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
        offline = clock.samples < config.offline.samples
        if not offline and not add_rollout(self.replay, self.rollout, self.outcomes, self.model_optimizer, clock):
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
        return self.add_random_draws(self._sample_sequences(counter), counter)

    def _sample_sequences(self, counter: int) -> dict[str, Any]:
        """Sample sequences [L x M, ...] of the replay buffer, of the offline data, or of both."""
        config, count = self.config, self.lane_batch
        if not config.offline.data:
            return self.replay.slices(counter, count, config.horizon)
        online = self.replay.count >= config.seed_samples
        from_data = round(count * config.offline.fraction) if online else count
        if not from_data:
            return self.replay.slices(counter, count, config.horizon)
        data = self._open_data().slices(counter, from_data)
        if from_data == count:
            return data
        replayed = self.replay.slices(counter, count - from_data, config.horizon)
        lanes = len(self.lanes)

        def join(one: Tensor, other: Tensor) -> Tensor:
            return torch.cat([x.unflatten(0, (lanes, -1)) for x in (one, other)], dim=1).flatten(0, 1)

        return {name: tree_map(join, value, replayed[name]) for name, value in data.items()}

    def _open_data(self) -> EpisodeData:
        """Open the offline data once, when it is first needed: a policy is loaded without it."""
        if self.offline_data is None:
            task, config = self.task, self.config
            tasks, shape = (
                [part.name for part in getattr(task, "parts", ())],
                encoder_space(task.observation_space).shape,
            )
            self.offline_data = EpisodeData(
                *(config.offline.data, tasks, shape, self.model.actions, config.horizon),
                *(self.lanes, "tdmpc2.offline", self.runtime.device),
            )
            digest = torch.tensor([self.offline_data.digest], device=self.runtime.device)
            if self.data_digest.any() and not torch.equal(self.data_digest, digest):
                raise ConfigError(
                    f"{', '.join(config.offline.data)} has changed since the run started.",
                    "Restore the data set, or start another run with --init-from.",
                )
            self.data_digest.copy_(digest)
        return self.offline_data

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
