"""An algorithm of your own, in one file: advantage actor-critic. `lockstep train examples/a2c.py`

Shapes: L local lanes, T horizon, E environments a lane, B = L x E local environments, lane after lane.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.config import ConfigError, Recipe, RunConfig, with_lanes
from lockstep.data.rollout import Episodes, Rollout, samples
from lockstep.functional import generalized_advantages, moments, schedule
from lockstep.lanes import Lanes
from lockstep.nets.actions import build_actions
from lockstep.nets.actor_critic import ActorCritic
from lockstep.nets.encoder import EncoderConfig
from lockstep.nets.init import initialising
from lockstep.protocols import Loss, Work
from lockstep.runtime import Adam, Optimizer
from lockstep.tasks.snake import SnakeConfig
from lockstep.trees import copy_into


@dataclass(frozen=True, kw_only=True)
class A2CConfig:
    """Settings of A2C. Every number is for the whole run, not for one process."""

    learning_rate: float = 1e-3
    """Learning rate at the start; it goes to zero over the run."""
    horizon: int = 8
    """Steps each environment takes between updates."""
    gamma: float = 0.99
    """Discount of future rewards."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus."""
    encoder: EncoderConfig = EncoderConfig(width=(16, 32), features=64)
    """Shape of the network."""

    def check(self, task, run):
        """Refuse impossible numbers, in words, before any process starts."""
        if self.horizon < 1:
            raise ConfigError(f"horizon is {self.horizon}.", "Take at least one step between updates.")
        Lanes(with_lanes(run, 1).lanes, range(0), run.seed).share(task.num_envs, "num_envs")

    def iteration_samples(self, task):
        return task.num_envs * self.horizon

    def build(self, task, runtime):
        return A2C(self, task, runtime)


class A2C:
    """One agent learning by A2C."""

    def __init__(self, config, task, runtime):
        self.config, self.task, self.runtime = config, task, runtime
        lanes = runtime.lanes
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.count * task.num_envs // len(lanes) * config.horizon  # of the whole run
        self.actions = build_actions(task.action_space)
        with initialising(lanes.shared_stream("a2c.init")):  # the same weights on every process
            self.net = ActorCritic(task.observation_space, self.actions, config.encoder).to(runtime.device)
        adam = Adam(self.net.named_parameters(), lr=config.learning_rate)
        self.optimizer = Optimizer(runtime, adam, max_grad_norm=0.5)
        self.noise = lanes.streams("a2c.noise")  # other draws on every lane
        self.rollout, self.episodes = Rollout(config.horizon), Episodes(lanes.local, self.envs)
        task.reset()

    @property
    def updates(self):
        return int(self.optimizer.updates)

    @torch.no_grad()
    def collect(self, clock):
        """Take `horizon` steps in every environment."""
        shape, device = (self.config.horizon, self.envs), self.runtime.device
        noise = self.actions.noise(self.noise, clock.iteration, *shape, device=device)  # [L, T, E, ...]
        obs = self.task.observe()
        for t, draws in enumerate(noise.transpose(0, 1).flatten(1, 2).unbind(0)):
            # Networks are applied through the runtime, which goes lane by lane in exact mode.
            acted = self.runtime.map_lanes(self._act, {"obs": obs, "noise": draws})
            seen = obs.clone()
            step = self.task.step(acted["action"])
            # What was cut off goes on in value from its last observation, not from the next episode's first.
            cut = self.runtime.map_lanes(self.net.value, step.final_obs)
            outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated, "cut": cut}
            self.rollout.write(t, {"obs": seen, **acted, **outcome, "told": step.episode})
            obs = step.obs
        self.last = self.runtime.map_lanes(self.net.value, obs)  # [B]
        ended = self.rollout["terminated"] | self.rollout["truncated"]
        return self.episodes.count(self.rollout["reward"], ended, self.rollout["told"])

    def _act(self, part):
        outputs, value = self.net(part["obs"])
        return {"action": self.actions.sample(outputs, part["noise"]), "value": value}

    def update(self, clock):
        """One step on everything that was collected."""
        kept, lanes = self.rollout, len(self.runtime.lanes)
        following = torch.cat([kept["value"][1:], self.last.unsqueeze(0)])
        following = torch.where(kept["truncated"], kept["cut"], following)
        ended = kept["terminated"] | kept["truncated"]
        advantage = generalized_advantages(
            kept["reward"], kept["value"], following, kept["terminated"], ended, self.config.gamma, 0.95
        )
        batch = {"obs": kept["obs"], "action": kept["action"], "return": advantage + kept["value"]}
        batch = samples(batch | {"advantage": advantage}, lanes)  # [L x T x E, ...], lane after lane
        # Mean and deviation of the whole run's advantages: sums by lane, pooled over all processes.
        by_lane = batch["advantage"].double().unflatten(0, (lanes, -1))
        table = torch.stack([torch.stack([lane.sum(), lane.square().sum()]) for lane in by_lane])  # [L, 2]
        mean, variance = moments(*self.runtime.pool(table), torch.tensor(float(self.samples)))
        batch["advantage"] = ((batch["advantage"] - mean) / (variance.sqrt() + 1e-8)).float()
        rate = schedule("linear", self.config.learning_rate, clock.progress)
        metrics = self.optimizer.step(self.loss, batch, rate)  # backward, one reduction, clip, step
        self.optimizer.confirm()
        return metrics

    def loss(self, batch):
        """A sum over samples and their count, never a mean: the division happens once, over the whole run."""
        outputs, value = self.net(batch["obs"])
        log_prob, entropy = self.actions.judge(outputs, batch["action"])
        policy, error = -(log_prob * batch["advantage"]), (value - batch["return"]).square()
        each = policy + 0.5 * error - self.config.entropy_weight * entropy
        sums = {"policy_loss": policy.detach().sum(), "entropy": entropy.detach().sum()}
        return Loss(each.sum(), len(value), sums)

    def policy(self):
        return Policy(self.net, self.actions)

    # What a checkpoint holds, and what a new run may start from.

    def weights(self):
        return {f"net.{name}": tensor for name, tensor in self.net.state_dict(keep_vars=True).items()}

    def shared_state(self):
        return self.weights() | self.optimizer.state()

    def load_shared_state(self, state):
        copy_into(self.shared_state(), state, "the agent")

    def lane_state(self, lane):
        return self.episodes.state(lane)

    def load_lane_state(self, lane, state):
        copy_into(self.lane_state(lane), state, f"lane {lane}")

    # For `lockstep bench` and `lockstep plan`: the work itself, with nothing around it, and where samples lie.

    def engine(self, fewer=1):
        obs = samples(self.rollout["obs"], len(self.runtime.lanes))
        obs = obs[: len(obs) // fewer].clone()

        def learn():
            outputs, value = self.net(obs)
            torch.autograd.grad(outputs.sum() + value.sum(), [p for p in self.net.parameters() if p.requires_grad])

        return [Work("learning", len(obs), 1, learn, fewer)]

    def buffers(self):
        return self.rollout.buffers


class Policy:
    """The most likely action for each observation."""

    def __init__(self, net, actions):
        self.net, self.actions = net, actions

    def initial_memory(self, count):
        return {}

    def act(self, obs, memory):
        action, _, after = self.decide(obs, memory)
        return action, after

    @torch.no_grad()
    def decide(self, obs, memory):
        outputs, _ = self.net(obs)
        return self.actions.mode(outputs), outputs, memory


@dataclass(frozen=True, kw_only=True)
class SnakeA2C(Recipe):
    """A2C learns Snake on a board of five by five."""

    task: SnakeConfig = SnakeConfig(size=5, num_envs=32)
    algo: A2CConfig = A2CConfig()
    run: RunConfig = RunConfig(samples=200_000, log_every=20_480, eval_every=51_200)
    smoke: ClassVar = {"task.num_envs": 16, "run": {"samples": 2048, "eval_every": 1024, "gif": False}}
