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

from lockstep.algorithms.env_work import env_work
from lockstep.config import ConfigError, RunConfig, with_lanes
from lockstep.data.replay import Replay, ReplayConfig, outcome, remember
from lockstep.data.rollout import Episodes, Rollout
from lockstep.lanes import Lanes
from lockstep.metrics import Metrics
from lockstep.nets.deterministic import Actor, Choice, Critic, Moves, Team, build_moves
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.init import initialising
from lockstep.nets.past_selves import PastSelves
from lockstep.protocols import Clock, LaneState, Loss, State, VecEnv, Work
from lockstep.runtime import Adam, Optimizer, Runtime
from lockstep.trees import Tree, copy_into, tree_map


@dataclass(frozen=True, kw_only=True)
class DDPGConfig:
    """Settings of DDPG. Every number is for the whole run, not for one process."""

    actor_rate: float = 1e-3
    """Learning rate of the actor."""
    critic_rate: float = 1e-3
    """Learning rate of the critics."""
    batch_size: int = 256
    """Samples of one update, over all processes."""
    capacity: int = 200_000
    """Samples that replay holds."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Where replay is kept."""
    learn_from: int = 1_000
    """Samples that replay must hold before learning starts; until then actions are random."""
    horizon: int = 1
    """Steps each environment takes between updates."""
    update_ratio: float = 1.0
    """Updates for each sample once learning has started."""
    gamma: float = 0.99
    """Discount of future rewards."""
    steps: int = 1
    """Steps of rewards in a target before the critics' own judgement follows."""
    tau: float = 0.005
    """How far targets move towards what was learned, in each update."""
    twin: bool = False
    """Two critics, of which a target believes the lower."""
    delay: int = 1
    """Updates of the critics for one of the actor."""
    smoothing: float = 0.0
    """Noise on the actions of targets: Gaussian and clipped at 0.5 for motions, a scale of Gumbel's for choices."""
    central: bool = False
    """Whether a critic judges the whole team: it sees what all its agents see and do."""
    noise: float = 0.1
    """Deviation of the noise on motions while exploring; a choice is drawn from the actor's own softmax."""
    epsilon: float = 0.1
    """Part of the actions that are random when learning starts."""
    epsilon_end: float = 0.0
    """The same from `epsilon_part` of the run on."""
    epsilon_part: float = 0.5
    """Part of the run over which epsilon falls from one to the other."""
    temperature: float = 1.0
    """Of the softmax through which gradients pass to a choice."""
    restraint: float = 1e-3
    """Weight of the squared outputs for choices, so that the actor does not become certain too early."""
    past_selves: int = 0
    """Past selves to play against, where the task lets an algorithm act for both teams; 0 leaves it to the script."""
    self_play: float = 0.5
    """Part of the games in which they are played against."""
    self_every: int = 100_000
    """Samples after which the oldest past self gives way to what the actor is by then."""
    max_grad_norm: float = 10.0
    """Gradients of the whole batch are clipped to this norm."""
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(width=(256,), activation="relu"))
    """Shape of each network."""

    def check(self, task: Any, run: RunConfig) -> None:
        """Refuse numbers that do not divide, in words, before any process starts."""
        lanes = with_lanes(run, 1).lanes or 0
        Lanes(lanes, range(0), run.seed).share(task.num_envs, "num_envs")
        Lanes(lanes, range(0), run.seed).share(self.batch_size, "batch_size")
        if self.horizon < 1 or self.steps < 1 or self.delay < 1:
            raise ConfigError(
                f"horizon is {self.horizon}, steps {self.steps}, delay {self.delay}.", "Use 1 or more of each."
            )
        if not task.num_envs <= self.learn_from <= self.capacity:
            raise ConfigError(
                f"learn_from is {self.learn_from}, and replay holds {self.capacity} samples of {task.num_envs} "
                "environments.",
                "Start to learn when there is something, and before replay is full.",
            )
        if self.update_ratio <= 0 or not 0 < self.tau <= 1:
            raise ConfigError(
                f"update_ratio is {self.update_ratio} and tau {self.tau}.", "Use more than 0, and at most 1 for tau."
            )

        if self.past_selves and not getattr(task, "both", False):
            raise ConfigError(
                f"past_selves is {self.past_selves}, and the task acts for the other team itself.",
                "Leave them out, or use a task with two teams and --task.both.",
            )
        if self.past_selves < 0 or self.self_every < 1 or not 0 <= self.self_play <= 1:
            raise ConfigError(
                f"past_selves is {self.past_selves}, self_every {self.self_every}, self_play {self.self_play}.",
                "Use 0 or more, 1 or more, and a part from 0 to 1.",
            )

    def iteration_samples(self, task: Any) -> int:
        return int(task.num_envs * self.horizon)

    def updates_until(self, samples: int) -> int:
        """Updates that are due when so many samples have been taken: a function of the clock, so a resume owes none."""
        return int(max(0, samples - self.learn_from) * self.update_ratio)

    def epsilon_at(self, progress: float) -> float:
        fallen = min(1.0, progress / self.epsilon_part) if self.epsilon_part > 0 else 1.0
        return self.epsilon + fallen * (self.epsilon_end - self.epsilon)

    def build(self, task: VecEnv, runtime: Runtime) -> "DDPG":
        return DDPG(self, task, runtime)


class DDPG:
    """One actor, shared by the team, and its critics."""

    def __init__(self, config: DDPGConfig, task: VecEnv, runtime: Runtime) -> None:
        self.config, self.task, self.runtime = config, task, runtime
        lanes = runtime.lanes
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.count * self.envs * config.horizon
        self.team = Team(task)
        self.moves = build_moves(self.team.action_space, config.temperature, config.noise)
        self.whole = config.central and self.team.several
        space, judged = (self.team.whole_space, self.team.agents) if self.whole else (self.team.own_space, 1)
        with initialising(lanes.shared_stream("ddpg.init")):
            self.actor = Actor(self.team.own_space, self.moves, config.encoder).to(runtime.device)
            self.critics = nn.ModuleList(
                Critic(space, judged * self.moves.width, judged, config.encoder) for _ in range(1 + config.twin)
            ).to(runtime.device)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        faced = round(config.self_play * self.envs)
        self.past = PastSelves(self.actor, self.moves, self.team, config.past_selves, faced, self.envs)
        self.actor_optimizer = self._optimizer(self.actor, config.actor_rate)
        self.critic_optimizer = self._optimizer(self.critics, config.critic_rate)
        self.exploring, self.chance = lanes.streams("ddpg.exploring"), lanes.streams("ddpg.chance")
        self.smoothing, self.choosing = lanes.streams("ddpg.smoothing"), lanes.streams("ddpg.choosing")
        self.episodes = Episodes(lanes.local, self.envs, runtime.device)
        self.rollout, self.outcomes, self.told = (Rollout(config.horizon) for _ in range(3))
        self.epsilon = torch.ones((), device=runtime.device)
        self._act = runtime.compilation(self._explore, "acting")
        self._follow = runtime.compilation(self._move_targets, "moving targets")
        obs, ended = task.reset(), torch.zeros(task.num_envs, dtype=torch.bool)
        agents = (task.num_envs, self.team.agents) if self.team.several else (task.num_envs,)  # [B, A] or [B]
        example = {
            "obs": self.team.ours_of(obs),
            "action": self.moves.example.expand(*agents, *self.moves.example.shape),
        }
        example |= {"reward": torch.zeros(agents), "terminated": ended, "truncated": ended}
        example |= {"next_obs": example["obs"]}
        self.replay = Replay(config.capacity, lanes, example, "ddpg.replay", config.replay, runtime.device)

    def _optimizer(self, net: nn.Module, rate: float) -> Optimizer:
        adam = Adam(net.named_parameters(), lr=rate)
        return Optimizer(self.runtime, adam, max_grad_norm=self.config.max_grad_norm)

    @property
    def updates(self) -> int:
        return int(self.critic_optimizer.updates)

    # -- collecting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, clock: Clock) -> Metrics:
        """Take `horizon` steps in every environment."""
        config, runtime, width = self.config, self.runtime, self.moves.width
        self.epsilon.fill_(config.epsilon_at(clock.progress) if self.replay.count >= config.learn_from else 1.0)
        shape = (config.horizon, self.envs, self.team.agents)
        noise = self.moves.noise(self.exploring, clock.iteration, *shape, device=runtime.device)  # [L, T, E, A, K]
        chance = self.chance.uniform(clock.iteration, *shape, width + 1, device=runtime.device)
        draws = torch.cat([noise * self.moves.spread, chance], dim=-1)  # [L, T, E, A, 2K + 1]
        for t, draw in enumerate(draws.transpose(0, 1).flatten(1, 2).unbind(0)):
            obs = self.task.observe()
            with runtime.phase("act"):
                action: Tensor = runtime.map_lanes(self._act, {"obs": obs, "draw": draw})
                # Before the step, which reuses their memory.
                self.rollout.write(t, self.team.ours_of({"obs": obs, "action": action}))
            with runtime.phase("env"):
                step = self.task.step(self.moves.executed(action))
            followed = outcome(step)
            self.outcomes.write(
                t, followed | {name: self.team.ours_of(followed[name]) for name in ("reward", "next_obs")}
            )
            self.told.write(t, {"earned": step.reward, **step.episode})
        ended = self.outcomes["terminated"] | self.outcomes["truncated"]
        return self.episodes.count(self.told["earned"], ended, {name: self.told[name] for name in step.episode})

    def _explore(self, part: dict[str, Any]) -> Tensor:
        """Actions as they are stored, [B, A + R] or [B, ...]: the actor's with noise, or with luck any; rivals' own."""
        seen, legal = self.team.own(self.team.ours_of(part["obs"]))
        noise, luck, uniform = part["draw"].flatten(0, 1).split((self.moves.width, 1, self.moves.width), dim=-1)
        with self.runtime.autocast():
            outputs = self.actor(seen)
        acted, anything = self.moves.act(outputs, noise, legal), self.moves.random(uniform, legal)
        stored = self.moves.stored(torch.where(luck < self.epsilon, anything, acted))
        stored = self.team.apart(stored)
        return torch.cat([stored, self.past.act(part["obs"])], dim=1) if self.team.rivals else stored

    # -- learning ------------------------------------------------------------------------------------------------------

    def update(self, clock: Clock) -> Metrics:
        """Remember what was collected, then take the updates that are due."""
        config, critic, actor = self.config, Metrics(), Metrics()
        if not remember(self.replay, self.rollout, self.outcomes, self.critic_optimizer, clock):
            return Metrics()
        due = config.updates_until(clock.samples + self.samples) - config.updates_until(clock.samples)
        for number in range(due if self.replay.count >= config.learn_from else 0):
            counter, where = self.updates, f"iteration {clock.iteration + 1}, batch {number + 1} of {due}"
            batch, again = self._draw(counter), partial(self._draw, counter)
            critic += self.critic_optimizer.step(self.critic_loss, batch, where=where, rebuild=again)
            if self.updates % config.delay == 0:
                actor += self.actor_optimizer.step(self.actor_loss, batch, where=where, rebuild=again)
                self._follow()
        self.critic_optimizer.confirm()
        self.actor_optimizer.confirm()
        kept = (clock.samples + self.samples) // config.self_every
        if self.past.copies and kept > clock.samples // config.self_every:
            self.past.remember(self.actor, kept)
        metrics = critic.under("critic")
        metrics += actor.under("actor")
        metrics.agree("epsilon", self.epsilon.clone(), 1.0)
        return metrics

    def _draw(self, counter: int) -> dict[str, Any]:
        """A batch [L x M, ...] of replay, with noise for choosing and for smoothing, [L x M, A, K] each."""
        config, count, device = self.config, self.config.batch_size // self.runtime.lanes.count, self.runtime.device
        batch = self.replay.sample(counter, count, config.steps, config.gamma)
        for name, streams in (("choosing", self.choosing), ("smoothing", self.smoothing)):
            noise = self.moves.noise(streams, counter, count, self.team.agents, device=device)
            batch[name] = noise.flatten(0, 1)
        return batch

    def critic_loss(self, batch: dict[str, Any]) -> Loss:
        """How far critics are from what rewards and targets say, squared, as sums over agents and samples."""
        with torch.no_grad():
            seen, legal = self.team.own(batch["next_obs"])
            noise = self.moves.smooth(batch["smoothing"].flatten(0, 1), self.config.smoothing)
            following = self.moves.act(self.target_actor(seen), noise, legal)
            values = torch.stack(self._judge(self.target_critics, batch["next_obs"], following)).amin(0)  # [N, A]
            target = batch["reward"].view_as(values) + batch["discount"].unsqueeze(-1) * values
        done = self.moves.vector(batch["action"].flatten(0, 1) if self.team.several else batch["action"])
        judged = self._judge(self.critics, batch["obs"], done)
        total = torch.stack([(values - target).square().sum() for values in judged]).sum()
        return Loss(total, samples=target.numel(), sums={"value": judged[0].detach().sum(), "target": target.sum()})

    def actor_loss(self, batch: dict[str, Any]) -> Loss:
        """What the first critic thinks of the actor's own actions; the optimizer moves nothing but the actor by it."""
        seen, legal = self.team.own(batch["obs"])
        outputs = self.actor(seen)
        choosing = batch["choosing"].flatten(0, 1) if isinstance(self.moves, Choice) else None
        value = self._judge(self.critics[:1], batch["obs"], self.moves.act(outputs, choosing, legal))[0]
        total = -value.sum()
        if choosing is not None:
            total = total + self.config.restraint * outputs.square().sum()
        return Loss(total, samples=value.numel(), sums={"value": value.detach().sum()})

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

    def engine(self, fewer: int = 1) -> list[Work]:
        """The environments, the actor's forward, and the bare updates, with nothing around them."""
        config, actor, critics = self.config, copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        rates = [Adam(net.parameters()) for net in (actor, critics)]
        lanes = self.runtime.lanes
        rows = max(1, config.batch_size // lanes.count * len(lanes) // fewer)
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

        updates = max(1, round(self.samples * config.update_ratio))
        works = [
            Work("inference", few, config.horizon, act, fewer),
            Work("learning", rows, updates, learn, fewer),
        ]
        action = self.team.with_rivals(self.moves.executed(self.rollout["action"][0]))
        env = env_work(self.task, action, config.horizon)
        return [env, *works] if fewer == 1 else works

    def buffers(self) -> Tree:
        rollouts = self.rollout.buffers | self.outcomes.buffers | self.told.buffers
        return {"rollout": rollouts, "replay": self.replay.buffers}

    def policy(self) -> "DDPGPolicy":
        return DDPGPolicy(self.actor, self.moves, self.team)

    def weights(self) -> State:
        nets = {"actor": self.actor, "critics": self.critics}
        nets |= {"target_actor": self.target_actor, "target_critics": self.target_critics}
        return {f"{n}.{name}": x for n, net in nets.items() for name, x in net.state_dict(keep_vars=True).items()}

    def shared_state(self) -> State:
        optimizers = self.actor_optimizer.state("actor_optimizer") | self.critic_optimizer.state("critic_optimizer")
        past = {f"past.{name}": x for name, x in self.past.copies.state_dict(keep_vars=True).items()}
        return self.weights() | past | optimizers

    def load_shared_state(self, state: State) -> None:
        copy_into(self.shared_state(), state, "the agent")

    def lane_state(self, lane: int) -> LaneState:
        replay = {f"replay.{name}": value for name, value in self.replay.lane_state(lane).items()}
        return {**self.episodes.state(lane), **replay}

    def load_lane_state(self, lane: int, state: State) -> None:
        replay = {name: tensor for name, tensor in state.items() if name.startswith("replay.")}
        rest = {name: tensor for name, tensor in state.items() if name not in replay}
        self.replay.load_lane_state(lane, {name.removeprefix("replay."): x for name, x in replay.items()})
        copy_into(self.episodes.state(lane), rest, f"lane {lane}")


class DDPGPolicy:
    """What the actor finds best for each observation, without noise."""

    def __init__(self, actor: Actor, moves: Moves, team: Team) -> None:
        self.actor, self.moves, self.team = actor, moves, team

    def initial_memory(self, count: int) -> Tree:
        return {}

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        action, _, after = self.decide(obs, memory)
        return action, after

    @torch.no_grad()
    def decide(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        seen, legal = self.team.own(self.team.ours_of(obs))
        outputs = self.actor(seen)
        action = self.moves.executed(self.moves.stored(self.moves.act(outputs, None, legal)))
        return self.team.with_rivals(self.team.apart(action)), self.team.apart(outputs), memory
