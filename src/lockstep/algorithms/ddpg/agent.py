"""DDPG: an actor follows the gradient of critics that learn from replay; for one agent, or for a team that shares it.

A sample is one step of an environment: A transitions, if a team of A agents acts in it. With twin critics and a delayed
actor it is TD3. Targets are state: every process moves its own in the same way, and nothing of them is reduced. Where
a task lets an algorithm act for the other team, too, past selves of the actor play there in some of the games.

Shapes: L local lanes, T horizon, E environments a lane, B = L x E, A agents of an environment, R rivals, K action
features, M samples a lane in a batch; N = L x M samples in a batch, or M in exact mode, where lanes come in turn.
"""

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.algorithms.ddpg.networks import ActionCodec, Actor, AgentAxis, Critic, DiscreteCodec, make_action_codec
from lockstep.algorithms.ddpg.opponent_pool import OpponentPool
from lockstep.algorithms.env_benchmark import env_work
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.data.replay_buffer import Replay, ReplayConfig, add_rollout, outcome
from lockstep.data.rollout import EpisodeStatistics, Rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam, Runtime
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.initialization import seeded_init
from lockstep.protocols import BenchmarkOp, LaneState, Loss, StateDict, VecEnv
from lockstep.pytree import Tree, load_into, tree_map


@dataclass(frozen=True, kw_only=True)
class DDPGConfig:
    """Settings of DDPG. Every number is for the whole run, not for one process."""

    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    batch_size: int = 256
    """Samples of one update, over all processes."""
    buffer_size: int = 200_000
    """Samples that replay holds."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Where replay is kept."""
    learning_starts: int = 1_000
    """Samples that replay must hold before learning starts; until then actions are random."""
    rollout_steps: int = 1
    """Steps each environment takes between updates."""
    updates_per_sample: float = 1.0
    """Updates for each sample once learning has started."""
    gamma: float = 0.99
    """Discount of future rewards."""
    n_step: int = 1
    """Steps of rewards in a target before the critics' own judgement follows."""
    tau: float = 0.005
    """How far targets move towards what was learned, in each update."""
    twin_critics: bool = False
    """Two critics, of which a target believes the lower."""
    policy_delay: int = 1
    """Updates of the critics for one of the actor."""
    target_noise: float = 0.0
    """Noise on the actions of targets: Gaussian and clipped at 0.5 for motions, a scale of Gumbel's for choices."""
    centralized_critic: bool = False
    """Whether a critic judges the whole team: it sees what all its agents see and do."""
    exploration_noise: float = 0.1
    """Deviation of the noise on motions while exploring; a choice is drawn from the actor's own softmax."""
    epsilon: float = 0.1
    """Part of the actions that are random when learning starts."""
    epsilon_end: float = 0.0
    """Exploration probability after `epsilon_decay_fraction` of the run."""
    epsilon_decay_fraction: float = 0.5
    """Part of the run over which epsilon falls from one to the other."""
    gumbel_temperature: float = 1.0
    """Of the softmax through which gradients pass to a choice."""
    logit_penalty: float = 1e-3
    """Weight of the squared outputs for choices, so that the actor does not become certain too early."""
    opponent_pool_size: int = 0
    """Past selves to play against, where the task lets an algorithm act for both teams; 0 leaves it to the script."""
    self_play_fraction: float = 0.5
    """Part of the games in which they are played against."""
    snapshot_every: int = 100_000
    """Samples after which the oldest past self gives way to what the actor is by then."""
    max_grad_norm: float = 10.0
    """Gradients of the whole batch are clipped to this norm."""
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(hidden_sizes=(256,), activation="relu"))
    """Shape of each network."""

    def validate(self, task: Any, run: RunConfig) -> None:
        """Refuse numbers that do not divide, in words, before any process starts."""
        lanes = resolve_lanes(run, 1).lanes or 0
        Lanes(lanes, range(0), run.seed).per_lane(task.num_envs, "num_envs")
        Lanes(lanes, range(0), run.seed).per_lane(self.batch_size, "batch_size")
        if self.rollout_steps < 1 or self.n_step < 1 or self.policy_delay < 1:
            raise ConfigError(
                f"rollout_steps is {self.rollout_steps}, n_step {self.n_step}, policy_delay {self.policy_delay}.",
                "Use 1 or more of each.",
            )
        if not task.num_envs <= self.learning_starts <= self.buffer_size:
            raise ConfigError(
                f"learning_starts is {self.learning_starts}, and replay holds {self.buffer_size} samples of "
                f"{task.num_envs} "
                "environments.",
                "Start to learn when there is something, and before replay is full.",
            )
        if self.updates_per_sample <= 0 or not 0 < self.tau <= 1:
            raise ConfigError(
                f"updates_per_sample is {self.updates_per_sample} and tau {self.tau}.",
                "Use more than 0, and at most 1 for tau.",
            )

        if self.opponent_pool_size and not getattr(task, "control_both_teams", False):
            raise ConfigError(
                f"opponent_pool_size is {self.opponent_pool_size}, and the task acts for the other team itself.",
                "Leave them out, or use a task with two teams and --task.control-both-teams.",
            )
        if self.opponent_pool_size < 0 or self.snapshot_every < 1 or not 0 <= self.self_play_fraction <= 1:
            raise ConfigError(
                f"opponent_pool_size is {self.opponent_pool_size}, snapshot_every {self.snapshot_every}, "
                f"self_play_fraction {self.self_play_fraction}.",
                "Use 0 or more, 1 or more, and a part from 0 to 1.",
            )

    def samples_per_iteration(self, task: Any) -> int:
        return int(task.num_envs * self.rollout_steps)

    def updates_until(self, samples: int) -> int:
        """Updates that are due when so many samples have been taken: a function of the clock, so a resume owes none."""
        return int(max(0, samples - self.learning_starts) * self.updates_per_sample)

    def epsilon_at(self, progress: float) -> float:
        fallen = min(1.0, progress / self.epsilon_decay_fraction) if self.epsilon_decay_fraction > 0 else 1.0
        return self.epsilon + fallen * (self.epsilon_end - self.epsilon)

    def build(self, task: VecEnv, runtime: Runtime) -> "DDPG":
        return DDPG(self, task, runtime)


class DDPG:
    """One actor, shared by the team, and its critics."""

    def __init__(self, config: DDPGConfig, task: VecEnv, runtime: Runtime) -> None:
        self.config, self.task, self.runtime = config, task, runtime
        lanes = runtime.lanes
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.num_lanes * self.envs * config.rollout_steps
        self.team = AgentAxis(task)
        self.moves = make_action_codec(self.team.action_space, config.gumbel_temperature, config.exploration_noise)
        self.whole = config.centralized_critic and self.team.several
        space, judged = (self.team.whole_space, self.team.agents) if self.whole else (self.team.own_space, 1)
        with seeded_init(lanes.shared_stream("ddpg.init")):
            self.actor = Actor(self.team.own_space, self.moves, config.encoder).to(runtime.device)
            self.critics = nn.ModuleList(
                Critic(space, judged * self.moves.width, judged, config.encoder) for _ in range(1 + config.twin_critics)
            ).to(runtime.device)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        faced = round(config.self_play_fraction * self.envs)
        self.past = OpponentPool(self.actor, self.moves, self.team, config.opponent_pool_size, faced, self.envs)
        self.actor_optimizer = self._optimizer(self.actor, config.actor_lr)
        self.critic_optimizer = self._optimizer(self.critics, config.critic_lr)
        self.exploring, self.chance = lanes.streams("ddpg.exploring"), lanes.streams("ddpg.chance")
        self.smoothing, self.choosing = lanes.streams("ddpg.smoothing"), lanes.streams("ddpg.choosing")
        self.episodes = EpisodeStatistics(lanes.local, self.envs, runtime.device)
        self.rollout, self.outcomes, self.told = (Rollout(config.rollout_steps) for _ in range(3))
        self.epsilon = torch.ones((), device=runtime.device)
        self._act = runtime.compilation(self._explore, "acting")
        self._update_targets = runtime.compilation(self._move_targets, "moving targets")
        obs, ended = task.reset(), torch.zeros(task.num_envs, dtype=torch.bool)
        agents = (task.num_envs, self.team.agents) if self.team.several else (task.num_envs,)  # [B, A] or [B]
        example = {
            "obs": self.team.ours_of(obs),
            "action": self.moves.example.expand(*agents, *self.moves.example.shape),
        }
        example |= {"reward": torch.zeros(agents), "terminated": ended, "truncated": ended}
        example |= {"next_obs": example["obs"]}
        self.replay = Replay(config.buffer_size, lanes, example, "ddpg.replay", config.replay, runtime.device)

    def _optimizer(self, net: nn.Module, rate: float) -> DistributedOptimizer:
        adam = FusedAdam(net.named_parameters(), lr=rate)
        return DistributedOptimizer(self.runtime, adam, max_grad_norm=self.config.max_grad_norm)

    @property
    def updates(self) -> int:
        return int(self.critic_optimizer.updates)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        config, runtime, width = self.config, self.runtime, self.moves.width
        self.epsilon.fill_(config.epsilon_at(clock.progress) if self.replay.count >= config.learning_starts else 1.0)
        shape = (config.rollout_steps, self.envs, self.team.agents)
        noise = self.moves.noise(self.exploring, clock.iteration, *shape, device=runtime.device)  # [L, T, E, A, K]
        chance = self.chance.uniform(clock.iteration, *shape, width + 1, device=runtime.device)
        draws = torch.cat([noise * self.moves.spread, chance], dim=-1)  # [L, T, E, A, 2K + 1]
        for t, draw in enumerate(draws.transpose(0, 1).flatten(1, 2).unbind(0)):
            obs = self.task.observations()
            with runtime.phase("act"):
                action: Tensor = runtime.map_lanes(self._act, {"obs": obs, "draw": draw})
                # Before the step, which reuses their memory.
                self.rollout.write(t, self.team.ours_of({"obs": obs, "action": action}))
            with runtime.phase("env"):
                step = self.task.step(self.moves.to_env(action))
            followed = outcome(step)
            self.outcomes.write(
                t, followed | {name: self.team.ours_of(followed[name]) for name in ("reward", "next_obs")}
            )
            self.told.write(t, {"earned": step.reward, **step.episode_info})
        ended = self.outcomes["terminated"] | self.outcomes["truncated"]
        return self.episodes.count(self.told["earned"], ended, {name: self.told[name] for name in step.episode_info})

    def _explore(self, part: dict[str, Any]) -> Tensor:
        """Actions as they are stored, [B, A + R] or [B, ...]: the actor's with noise, or with luck any; rivals' own."""
        seen, legal = self.team.own(self.team.ours_of(part["obs"]))
        noise, luck, uniform = part["draw"].flatten(0, 1).split((self.moves.width, 1, self.moves.width), dim=-1)
        with self.runtime.autocast():
            outputs = self.actor(seen)
        acted, anything = self.moves.act(outputs, noise, legal), self.moves.random(uniform, legal)
        stored = self.moves.encode(torch.where(luck < self.epsilon, anything, acted))
        stored = self.team.apart(stored)
        return torch.cat([stored, self.past.act(part["obs"])], dim=1) if self.team.rivals else stored

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: TrainState) -> Metrics:
        """Remember what was collected, then take the updates that are due."""
        config, critic, actor = self.config, Metrics(), Metrics()
        if not add_rollout(self.replay, self.rollout, self.outcomes, self.critic_optimizer, clock):
            return Metrics()
        due = config.updates_until(clock.samples + self.samples) - config.updates_until(clock.samples)
        for number in range(due if self.replay.count >= config.learning_starts else 0):
            counter, where = self.updates, f"iteration {clock.iteration + 1}, batch {number + 1} of {due}"
            batch, again = self._sample_batch(counter), partial(self._sample_batch, counter)
            critic += self.critic_optimizer.step(self.critic_loss, batch, where=where, rebuild=again)
            if self.updates % config.policy_delay == 0:
                actor += self.actor_optimizer.step(self.actor_loss, batch, where=where, rebuild=again)
                self._update_targets()
        self.critic_optimizer.check_last_step()
        self.actor_optimizer.check_last_step()
        kept = (clock.samples + self.samples) // config.snapshot_every
        if self.past.copies and kept > clock.samples // config.snapshot_every:
            self.past.add_snapshot(self.actor, kept)
        metrics = critic.with_prefix("critic")
        metrics += actor.with_prefix("actor")
        metrics.add_global("epsilon", self.epsilon.clone(), 1.0)
        return metrics

    def _sample_batch(self, counter: int) -> dict[str, Any]:
        """A batch [L x M, ...] of replay, with noise for choosing and for smoothing, [L x M, A, K] each."""
        config, count, device = self.config, self.config.batch_size // self.runtime.lanes.num_lanes, self.runtime.device
        batch = self.replay.sample(counter, count, config.n_step, config.gamma)
        for name, streams in (("choosing", self.choosing), ("smoothing", self.smoothing)):
            noise = self.moves.noise(streams, counter, count, self.team.agents, device=device)
            batch[name] = noise.flatten(0, 1)
        return batch

    def critic_loss(self, batch: dict[str, Any]) -> Loss:
        """How far critics are from what rewards and targets say, squared, as sums over agents and samples."""
        with torch.no_grad():
            seen, legal = self.team.own(batch["next_obs"])
            noise = self.moves.target_noise(batch["smoothing"].flatten(0, 1), self.config.target_noise)
            following = self.moves.act(self.target_actor(seen), noise, legal)
            values = torch.stack(self._judge(self.target_critics, batch["next_obs"], following)).amin(0)  # [N, A]
            target = batch["reward"].view_as(values) + batch["discount"].unsqueeze(-1) * values
        done = self.moves.vector(batch["action"].flatten(0, 1) if self.team.several else batch["action"])
        judged = self._judge(self.critics, batch["obs"], done)
        total = torch.stack([(values - target).square().sum() for values in judged]).sum()
        return Loss(
            total, num_samples=target.numel(), metric_sums={"value": judged[0].detach().sum(), "target": target.sum()}
        )

    def actor_loss(self, batch: dict[str, Any]) -> Loss:
        """What the first critic thinks of the actor's own actions; the optimizer moves nothing but the actor by it."""
        seen, legal = self.team.own(batch["obs"])
        outputs = self.actor(seen)
        choosing = batch["choosing"].flatten(0, 1) if isinstance(self.moves, DiscreteCodec) else None
        value = self._judge(self.critics[:1], batch["obs"], self.moves.act(outputs, choosing, legal))[0]
        total = -value.sum()
        if choosing is not None:
            total = total + self.config.logit_penalty * outputs.square().sum()
        return Loss(total, num_samples=value.numel(), metric_sums={"value": value.detach().sum()})

    def _judge(self, critics: Any, obs: Tree, vectors: Tensor) -> list[Tensor]:
        """What each critic thinks of the actions [N x A, K] of all agents, [N, A] each."""
        if self.whole:
            joint = vectors.unflatten(0, (-1, self.team.agents)).flatten(1)  # [N, A x K]
            return [critic(self.team.whole(obs), joint) for critic in critics]
        seen, _ = self.team.own(obs)
        return [critic(seen, vectors).view(-1, self.team.agents) for critic in critics]

    @torch.no_grad()
    def _move_targets(self) -> None:
        """Move targets a little towards what was learned."""
        for target, live in ((self.target_actor, self.actor), (self.target_critics, self.critics)):
            torch._foreach_lerp_(list(target.parameters()), list(live.parameters()), self.config.tau)

    # -- what it is made of --------------------------------------------------------------------------------------------

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """The environments, the actor's forward, and the bare updates, with nothing around them."""
        config, actor, critics = self.config, copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        rates = [FusedAdam(net.parameters()) for net in (actor, critics)]
        lanes = self.runtime.lanes
        rows = max(1, config.batch_size // lanes.num_lanes * len(lanes) // fewer)
        few = max(1, self.task.num_envs // fewer)  # a process may have fewer environments than that
        obs, batch = (
            tree_map(lambda x, n=n: x[0, :1].expand(n, *x.shape[2:]).clone(), self.rollout["obs"]) for n in (few, rows)
        )
        seen, batch_seen = self.team.own(obs)[0], self.team.own(batch)[0]

        @torch.no_grad()
        def act() -> None:
            with self.runtime.autocast():
                actor(seen)

        def learn() -> None:
            with self.runtime.autocast():
                vectors = self.moves.act(actor(batch_seen), None, None)
                judged = self._judge(critics, batch, vectors)
            for rate in rates:
                rate.zero_grad()
            torch.stack([values.sum() for values in judged]).sum().backward()
            for rate in rates:
                rate.step()

        updates = max(1, round(self.samples * config.updates_per_sample))
        works = [
            BenchmarkOp("inference", few, config.rollout_steps, act, fewer),
            BenchmarkOp("learning", rows, updates, learn, fewer),
        ]
        action = self.team.with_rivals(self.moves.to_env(self.rollout["action"][0]))
        env = env_work(self.task, action, config.rollout_steps)
        return [env, *works] if fewer == 1 else works

    def sample_buffers(self) -> Tree:
        rollouts = self.rollout.buffers | self.outcomes.buffers | self.told.buffers
        return {"rollout": rollouts, "replay": self.replay.buffers}

    def policy(self) -> "DDPGPolicy":
        return DDPGPolicy(self.actor, self.moves, self.team)

    def model_state_dict(self) -> StateDict:
        nets = {"actor": self.actor, "critics": self.critics}
        nets |= {"target_actor": self.target_actor, "target_critics": self.target_critics}
        return {f"{n}.{name}": x for n, net in nets.items() for name, x in net.state_dict(keep_vars=True).items()}

    def shared_state(self) -> StateDict:
        optimizers = self.actor_optimizer.state("actor_optimizer") | self.critic_optimizer.state("critic_optimizer")
        past = {f"past.{name}": x for name, x in self.past.copies.state_dict(keep_vars=True).items()}
        return self.model_state_dict() | past | optimizers

    def load_shared_state(self, state: StateDict) -> None:
        load_into(self.shared_state(), state, "the agent")

    def lane_state(self, lane: int) -> LaneState:
        replay = {f"replay.{name}": value for name, value in self.replay.lane_state(lane).items()}
        return {**self.episodes.state(lane), **replay}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        replay = {name: tensor for name, tensor in state.items() if name.startswith("replay.")}
        rest = {name: tensor for name, tensor in state.items() if name not in replay}
        self.replay.load_lane_state(lane, {name.removeprefix("replay."): x for name, x in replay.items()})
        load_into(self.episodes.state(lane), rest, f"lane {lane}")


class DDPGPolicy:
    """What the actor finds best for each observation, without noise."""

    def __init__(self, actor: Actor, moves: ActionCodec, team: AgentAxis) -> None:
        self.actor, self.moves, self.team = actor, moves, team

    def initial_state(self, count: int) -> Tree:
        return {}

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        action, _, after = self.forward(obs, memory)
        return action, after

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        seen, legal = self.team.own(self.team.ours_of(obs))
        outputs = self.actor(seen)
        action = self.moves.to_env(self.moves.encode(self.moves.act(outputs, None, legal)))
        return self.team.with_rivals(self.team.apart(action)), self.team.apart(outputs), memory
