"""An algorithm of your own, in one file: advantage actor-critic. `lockstep train examples/a2c.py`

Shapes: L local lanes, T horizon, E environments a lane, B = L x E local environments, lane after lane.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.config import ConfigError, Recipe, RunConfig, resolve_lanes
from lockstep.data.rollout import EpisodeStatistics, Rollout, flatten_rollout
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.lanes import Lanes
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.initialization import seeded_init
from lockstep.ops.functional import compute_gae, moments, schedule
from lockstep.protocols import BenchmarkOp, Loss
from lockstep.pytree import load_into
from lockstep.tasks.snake.env import SnakeConfig


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
    encoder: EncoderConfig = EncoderConfig(hidden_sizes=(16, 32), out_features=64)
    """Shape of the network."""

    def validate(self, task, run):
        """Refuse impossible numbers, in words, before any process starts."""
        if self.horizon < 1:
            raise ConfigError(f"horizon is {self.horizon}.", "Take at least one step between updates.")
        Lanes(resolve_lanes(run, 1).lanes, range(0), run.seed).per_lane(task.num_envs, "num_envs")

    def samples_per_iteration(self, task):
        return task.num_envs * self.horizon

    def build(self, task, runtime):
        return A2C(self, task, runtime)


class A2C:
    """One agent learning by A2C."""

    def __init__(self, config, task, runtime):
        self.config, self.task, self.runtime = config, task, runtime
        lanes = runtime.lanes
        self.envs = task.num_envs // len(lanes)
        self.samples = lanes.num_lanes * task.num_envs // len(lanes) * config.horizon  # of the whole run
        self.actions = make_distribution(task.action_space)
        with seeded_init(lanes.shared_stream("a2c.init")):  # the same weights on every process
            self.net = ActorCritic(task.observation_space, self.actions, config.encoder).to(runtime.device)
        adam = FusedAdam(self.net.named_parameters(), lr=config.learning_rate)
        self.optimizer = DistributedOptimizer(runtime, adam, max_grad_norm=0.5)
        self.noise = lanes.streams("a2c.noise")  # other draws on every lane
        self.rollout, self.episodes = Rollout(config.horizon), EpisodeStatistics(lanes.local, self.envs)
        task.reset()

    @property
    def updates(self):
        return int(self.optimizer.updates)

    @torch.no_grad()
    def collect(self, clock):
        """Take `horizon` steps in every environment."""
        shape, device = (self.config.horizon, self.envs), self.runtime.device
        noise = self.actions.sample_noise(self.noise, clock.iteration, *shape, device=device)  # [L, T, E, ...]
        obs = self.task.observations()
        for t, draws in enumerate(noise.transpose(0, 1).flatten(1, 2).unbind(0)):
            # Networks are applied through the runtime, which goes lane by lane in exact mode.
            acted = self.runtime.map_lanes(self._act, {"obs": obs, "noise": draws})
            seen = obs.clone()
            step = self.task.step(acted["action"])
            # What was cut off goes on in value from its last observation, not from the next episode's first.
            cut = self.runtime.map_lanes(self.net.value, step.final_obs)
            outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated, "cut": cut}
            self.rollout.write(t, {"obs": seen, **acted, **outcome, "told": step.episode_info})
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
        advantage = compute_gae(
            kept["reward"], kept["value"], following, kept["terminated"], ended, self.config.gamma, 0.95
        )
        batch = {"obs": kept["obs"], "action": kept["action"], "return": advantage + kept["value"]}
        batch = flatten_rollout(batch | {"advantage": advantage}, lanes)  # [L x T x E, ...], lane after lane
        # Mean and deviation of the whole run's advantages: sums by lane, pooled over all processes.
        by_lane = batch["advantage"].double().unflatten(0, (lanes, -1))
        table = torch.stack([torch.stack([lane.sum(), lane.square().sum()]) for lane in by_lane])  # [L, 2]
        mean, variance = moments(*self.runtime.exact_sum(table), torch.tensor(float(self.samples)))
        batch["advantage"] = ((batch["advantage"] - mean) / (variance.sqrt() + 1e-8)).float()
        rate = schedule("linear", self.config.learning_rate, clock.progress)
        metrics = self.optimizer.step(self.loss, batch, rate)  # backward, one reduction, clip, step
        self.optimizer.check_last_step()
        return metrics

    def loss(self, batch):
        """A sum over samples and their count, never a mean: the division happens once, over the whole run."""
        outputs, value = self.net(batch["obs"])
        log_prob, entropy = self.actions.log_prob_and_entropy(outputs, batch["action"])
        policy, error = -(log_prob * batch["advantage"]), (value - batch["return"]).square()
        each = policy + 0.5 * error - self.config.entropy_weight * entropy
        sums = {"policy_loss": policy.detach().sum(), "entropy": entropy.detach().sum()}
        return Loss(each.sum(), len(value), sums)

    def policy(self):
        return Policy(self.net, self.actions)

    # What a checkpoint holds, and what a new run may start from.

    def model_state_dict(self):
        return {f"net.{name}": tensor for name, tensor in self.net.state_dict(keep_vars=True).items()}

    def shared_state(self):
        return self.model_state_dict() | self.optimizer.state()

    def load_shared_state(self, state):
        load_into(self.shared_state(), state, "the agent")

    def lane_state(self, lane):
        return self.episodes.state(lane)

    def load_lane_state(self, lane, state):
        load_into(self.lane_state(lane), state, f"lane {lane}")

    # For `lockstep bench` and `lockstep plan`: the work itself, with nothing around it, and where samples lie.

    def benchmark_ops(self, fewer=1):
        obs = flatten_rollout(self.rollout["obs"], len(self.runtime.lanes))
        obs = obs[: len(obs) // fewer].clone()

        def learn():
            outputs, value = self.net(obs)
            torch.autograd.grad(outputs.sum() + value.sum(), [p for p in self.net.parameters() if p.requires_grad])

        return [BenchmarkOp("learning", len(obs), 1, learn, fewer)]

    def sample_buffers(self):
        return self.rollout.buffers


class Policy:
    """The most likely action for each observation."""

    def __init__(self, net, actions):
        self.net, self.actions = net, actions

    def initial_state(self, count):
        return {}

    def act(self, obs, memory):
        action, _, after = self.forward(obs, memory)
        return action, after

    @torch.no_grad()
    def forward(self, obs, memory):
        outputs, _ = self.net(obs)
        return self.actions.mode(outputs), outputs, memory


@dataclass(frozen=True, kw_only=True)
class SnakeA2C(Recipe):
    """A2C learns Snake on a board of five by five."""

    task: SnakeConfig = SnakeConfig(size=5, num_envs=32)
    algo: A2CConfig = A2CConfig()
    run: RunConfig = RunConfig(total_samples=200_000, log_every=20_480, eval_every=51_200)
    smoke_overrides: ClassVar = {
        "task.num_envs": 16,
        "run": {"total_samples": 2048, "eval_every": 1024, "record_video": False},
    }
