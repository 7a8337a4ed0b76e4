"""Deep deterministic policy gradient (DDPG) and TD3, for one agent or for a team that shares one actor.

DDPG: Lillicrap et al., 2015, arXiv:1509.02971. TD3 is DDPG with `twin_critics`, `policy_delay` and `target_noise`:
Fujimoto et al., 2018, arXiv:1802.09477.

A sample is one environment step: A transitions if a team of A agents acts. Target networks are not reduced, because
every process updates its copy in the same way. If the task lets the algorithm control both teams, snapshots of the
actor play for the other team in some games.

Shapes: L local lanes, T rollout steps, E environments per lane, B = L x E, A agents and R opponents (rivals) per
environment, K action features, M samples per lane in a batch; N = L x M samples, or M in exact mode (lane by lane).
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.algorithms.actor_critic_benchmark import actor_critic_ops
from lockstep.algorithms.ddpg.config import DDPGConfig as DDPGConfig
from lockstep.algorithms.ddpg.networks import AgentAxis, DiscreteCodec, make_action_codec
from lockstep.algorithms.ddpg.opponent_pool import OpponentPool
from lockstep.algorithms.ddpg.opponent_sampling import PrioritizedSampling
from lockstep.algorithms.ddpg.policy import DDPGPolicy
from lockstep.algorithms.off_policy import scaled_rate
from lockstep.base import Algorithm
from lockstep.clock import TrainState
from lockstep.data.episode_statistics import EpisodeStatistics
from lockstep.data.replay_buffer import Replay, add_rollout, outcome
from lockstep.data.rollout import Rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.metrics import Metrics
from lockstep.nn.q_networks import Actor, make_critic, soft_update
from lockstep.protocols import BenchmarkOp, Loss
from lockstep.pytree import Tree, tree_map


class DDPG(Algorithm):
    """One actor, shared by the team, and its critics."""

    Config = DDPGConfig
    config: DDPGConfig
    eval_share = 0.4

    def setup(self) -> None:
        config, task, runtime, lanes = self.config, self.task, self.runtime, self.lanes
        self.team = AgentAxis(task)
        self.codec = make_action_codec(self.team.action_space, config.gumbel_temperature, config.exploration_noise)
        self.centralized = config.centralized_critic and self.team.multi_agent
        space, values = (self.team.joint_space, self.team.agents) if self.centralized else (self.team.agent_space, 1)
        self.actor = Actor(self.team.agent_space, self.codec.width, config.encoder).to(runtime.device)
        self.critics = nn.ModuleList(
            make_critic(space, values * self.codec.width, values, config.encoder, config.critic_action_input)
            for _ in range(1 + config.twin_critics)
        ).to(runtime.device)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        games = round(config.self_play_fraction * self.envs_per_lane)
        self.past = OpponentPool(
            self.actor, self.codec, self.team, config.opponent_pool_size, games, self.envs_per_lane
        )
        self.sampling: PrioritizedSampling | None = None
        if config.opponent_sampling == "pfsp":
            index_in_lane = torch.arange(task.num_envs, device=runtime.device) % self.envs_per_lane
            self.sampling = PrioritizedSampling(config.opponent_pool_size, config.pfsp_power, index_in_lane, games)
            self.register_state("opponent_results", self.sampling.results)
            self.register_lane_state("opponents", self.sampling.opponents)
        self.actor_optimizer = self._optimizer(self.actor, config.actor_lr)
        self.critic_optimizer = self._optimizer(self.critics, config.critic_lr)
        self.explore_rng, self.epsilon_rng = lanes.streams("ddpg.exploring"), lanes.streams("ddpg.chance")
        self.opponent_rng = lanes.streams("ddpg.opponents")
        self.target_rng, self.actor_rng = lanes.streams("ddpg.smoothing"), lanes.streams("ddpg.choosing")
        self.episodes = EpisodeStatistics(lanes.local, self.envs_per_lane, runtime.device)
        self.rollout, self.outcomes, self.infos = (Rollout(config.rollout_steps) for _ in range(3))
        self.epsilon = torch.ones((), device=runtime.device)
        self._act = runtime.compilation(self._explore, "acting")
        self._update_targets = runtime.compilation(self._soft_update_targets, "target update")
        obs, ended = self.team.drop_rivals(task.observations()), torch.zeros(task.num_envs, dtype=torch.bool)
        agents = (task.num_envs, self.team.agents) if self.team.multi_agent else (task.num_envs,)  # [B, A] or [B]
        example = {"obs": obs, "action": self.codec.example.expand(*agents, *self.codec.example.shape)}
        example |= {"reward": torch.zeros(agents), "terminated": ended, "truncated": ended, "next_obs": obs}
        self.replay = Replay(config.buffer_size, lanes, example, "ddpg.replay", config.replay, runtime.device)
        self._transitions = partial(self.replay.transitions, steps=config.n_step, discount=config.gamma)
        if runtime.compilation.mode == "graphs" and self.replay.device.type == "cuda":
            self._transitions = runtime.compilation(partial(self._transitions, in_graph=True), "sampling")

    def _optimizer(self, net: nn.Module, rate: float) -> DistributedOptimizer:
        adam = FusedAdam(net.named_parameters(), lr=rate)
        limit, pieces = self.config.max_grad_norm, self.config.grad_accum_steps
        return DistributedOptimizer(self.runtime, adam, max_grad_norm=limit, accumulate=pieces)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        config, runtime, width = self.config, self.runtime, self.codec.width
        # Exploration: epsilon, and the random draws of the whole rollout
        self.epsilon.fill_(config.epsilon_at(clock.progress) if self.replay.count >= config.learning_starts else 1.0)
        shape = (config.rollout_steps, self.envs_per_lane, self.team.agents)
        noise = self.codec.noise(self.explore_rng, clock.iteration, *shape, device=runtime.device)  # [L, T, E, A, K]
        uniform = self.epsilon_rng.uniform(clock.iteration, *shape, width + 1, device=runtime.device)
        draws = torch.cat([noise * self.codec.noise_scale, uniform], dim=-1)  # [L, T, E, A, 2K + 1]
        if self.sampling is not None:
            opponent_draws = self.opponent_rng.uniform(clock.iteration, *shape[:2], device=runtime.device)  # [L, T, E]

        # Environment steps
        for t, draw in enumerate(draws.transpose(0, 1).flatten(1, 2).unbind(0)):
            obs = self.task.observations()
            with runtime.phase("act"):
                part = {"obs": obs, "draw": draw}
                if self.sampling is not None:
                    part["opponents"] = self.sampling.opponents
                action: Tensor = runtime.map_lanes(self._act, part)
                # Write before the step: the task reuses the memory of observations.
                self.rollout.write(t, self.team.drop_rivals({"obs": obs, "action": action}))
            with runtime.phase("env"):
                step = self.task.step(self.codec.to_env(action))
            result = outcome(step)
            team = {name: self.team.drop_rivals(result[name]) for name in ("reward", "next_obs")}
            self.outcomes.write(t, result | team)
            self.infos.write(t, {"rewards": step.reward, **step.episode_info})
            if self.sampling is not None:
                ended = step.terminated | step.truncated
                self.sampling.end_step(ended, step.episode_info, opponent_draws[:, t].flatten())

        # Episode statistics
        ended = self.outcomes["terminated"] | self.outcomes["truncated"]
        return self.episodes.count(self.infos["rewards"], ended, {name: self.infos[name] for name in step.episode_info})

    def _explore(self, part: dict[str, Any]) -> Tensor:
        """Return stored actions [B, A + R] or [B, ...]: the actor's with noise, or random ones; then the opponents'."""
        agent_obs, legal = self.team.agent_inputs(self.team.drop_rivals(part["obs"]))
        noise, epsilon_draw, uniform = part["draw"].flatten(0, 1).split((self.codec.width, 1, self.codec.width), dim=-1)
        with self.runtime.autocast():
            outputs = self.actor(agent_obs)
        noisy, random = self.codec.act(outputs, noise, legal), self.codec.random(uniform, legal)
        stored = self.team.group_by_env(self.codec.encode(torch.where(epsilon_draw < self.epsilon, random, noisy)))
        return (
            torch.cat([stored, self.past.act(part["obs"], part.get("opponents"))], dim=1)
            if self.team.rivals
            else stored
        )

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: TrainState) -> Metrics:
        """Add the rollout to the replay buffer, then take the updates that are due."""
        config, critic, actor = self.config, Metrics(), Metrics()
        # Results against the opponent pool
        if self.sampling is not None:
            self.sampling.end_iteration(self.runtime.all_reduce_sum)
        # Replay buffer
        if not add_rollout(self.replay, self.rollout, self.outcomes, self.critic_optimizer, clock):
            return Metrics()

        batches = config.batch_size, config.reference_batch_size
        rates = [
            scaled_rate(config.lr_scaling, rate, *batches, clock.progress, config.schedule)
            for rate in (config.critic_lr, config.actor_lr)
        ]
        due = config.updates_until(clock.samples + self.samples) - config.updates_until(clock.samples)
        for number in range(due if self.replay.count >= config.learning_starts else 0):
            counter, where = self.updates, f"iteration {clock.iteration + 1}, batch {number + 1} of {due}"
            batch, rebuild = self._sample_batch(counter), partial(self._sample_batch, counter)
            # Critic update
            critic += self.critic_optimizer.step(self.critic_loss, batch, rates[0], where, rebuild)
            if self.updates % config.policy_delay == 0:
                # Actor update
                actor += self.actor_optimizer.step(self.actor_loss, batch, rates[1], where, rebuild)
                # Target networks
                self._update_targets()
        self.critic_optimizer.check_last_step()
        self.actor_optimizer.check_last_step()

        # Opponent pool
        snapshots = (clock.samples + self.samples) // config.snapshot_every
        if self.past.copies and snapshots > clock.samples // config.snapshot_every:
            self.past.add_snapshot(self.actor, snapshots)
            if self.sampling is not None:
                self.sampling.replace_snapshot(snapshots % len(self.past.copies))

        metrics = critic.with_prefix("critic")
        metrics += actor.with_prefix("actor")
        metrics.add_global("epsilon", self.epsilon.clone(), 1.0)
        if self.sampling is not None:
            metrics.add_global("lowest_pool_win_rate", self.sampling.win_rates().amin(), 1.0)
        return metrics

    def _sample_batch(self, counter: int) -> dict[str, Any]:
        """Sample a batch [L x M, ...] of the replay buffer, with noise [L x M, A, K] for the actor and for targets."""
        count, device = self.config.batch_size // self.runtime.lanes.num_lanes, self.runtime.device
        batch = self._transitions(self.replay.draw(counter, count))
        for name, streams in (("choosing", self.actor_rng), ("smoothing", self.target_rng)):
            batch[name] = self.codec.noise(streams, counter, count, self.team.agents, device=device).flatten(0, 1)
        return batch

    def critic_loss(self, batch: dict[str, Any]) -> Loss:
        """Return the squared temporal-difference errors of all critics, as sums over agents and samples."""
        # Targets: rewards plus the discounted value of the target actor's next actions, the lower one of twin critics
        with torch.no_grad():
            agent_obs, legal = self.team.agent_inputs(batch["next_obs"])
            noise = self.codec.target_noise(batch["smoothing"].flatten(0, 1), self.config.target_noise)
            next_action = self.codec.act(self.target_actor(agent_obs), noise, legal)
            values = torch.stack(self._q_values(self.target_critics, batch["next_obs"], next_action)).amin(0)  # [N, A]
            target = batch["reward"].view_as(values) + batch["discount"].unsqueeze(-1) * values

        # Errors of the stored actions
        vectors = self.codec.vector(batch["action"].flatten(0, 1) if self.team.multi_agent else batch["action"])
        q_values = self._q_values(self.critics, batch["obs"], vectors)
        total = torch.stack([(values - target).square().sum() for values in q_values]).sum()
        return Loss(
            total, num_samples=target.numel(), metric_sums={"value": q_values[0].detach().sum(), "target": target.sum()}
        )

    def actor_loss(self, batch: dict[str, Any]) -> Loss:
        """Return the negative value of the actor's actions by the first critic, or by all critics if it is expected.

        Only the actor is updated with it.
        """
        agent_obs, legal = self.team.agent_inputs(batch["obs"])
        outputs = self.actor(agent_obs)
        noise = batch["choosing"].flatten(0, 1) if isinstance(self.codec, DiscreteCodec) else None
        if self.config.actor_gradient == "expected":
            value = self._expected_value(agent_obs, outputs, legal)
        else:
            value = self._q_values(self.critics[:1], batch["obs"], self.codec.act(outputs, noise, legal))[0]
        total = -value.sum()
        if noise is not None:
            total = total + self.config.logit_penalty * outputs.square().sum()
        return Loss(total, num_samples=value.numel(), metric_sums={"value": value.detach().sum()})

    def _expected_value(self, agent_obs: Tree, outputs: Tensor, legal: Tensor | None) -> Tensor:
        """Return the mean value of the discrete actions [N x A], weighted by the probabilities of the logits."""
        width = self.codec.width
        with torch.no_grad():  # the gradient is that of the probabilities
            repeated = tree_map(lambda x: x.repeat_interleave(width, 0), agent_obs)
            actions = torch.eye(width, device=outputs.device).repeat(len(outputs), 1)  # [N x A x K, K]
            values = torch.stack([critic(repeated, actions).view(-1, width) for critic in self.critics]).mean(0)
        logits = outputs if legal is None else outputs.masked_fill(legal == 0, -torch.inf)
        return (logits.softmax(-1) * values).sum(-1)

    def _q_values(self, critics: Any, obs: Tree, vectors: Tensor) -> list[Tensor]:
        """Return the values of the actions [N x A, K] of all agents by each critic, [N, A] each."""
        if self.centralized:
            joint = vectors.unflatten(0, (-1, self.team.agents)).flatten(1)  # [N, A x K]
            return [critic(self.team.joint_obs(obs), joint) for critic in critics]
        agent_obs, _ = self.team.agent_inputs(obs)
        return [critic(agent_obs, vectors).view(-1, self.team.agents) for critic in critics]

    def _soft_update_targets(self) -> None:
        """Soft-update the target networks (Polyak averaging)."""
        soft_update(self.target_actor, self.actor, self.config.tau)
        soft_update(self.target_critics, self.critics, self.config.tau)

    # -- benchmark and policy ------------------------------------------------------------------------------------------

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """Return the operations of an iteration without the code around them: environments, inference and updates."""

        def q_values(critics: nn.ModuleList, obs: Tree, outputs: Tensor) -> list[Tensor]:
            return self._q_values(critics, obs, self.codec.act(outputs, None, None))

        def env_action() -> Tensor:
            return self.team.add_rivals(self.codec.to_env(self.rollout["action"][0]))

        return actor_critic_ops(self, lambda obs: self.team.agent_inputs(obs)[0], q_values, env_action, fewer)

    def policy(self) -> DDPGPolicy:
        return DDPGPolicy(self.actor, self.codec, self.team)
