"""A custom algorithm in one file: advantage actor-critic. `lockstep train examples/a2c.py`"""

from dataclasses import dataclass
from typing import Any, ClassVar

from lockstep import Algorithm, Recipe, RunConfig, SnakeConfig
from lockstep.algorithms.greedy_policy import GreedyPolicy
from lockstep.clock import TrainState
from lockstep.data.collector import OnPolicyCollector, standardize
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.metrics import Metrics
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.nn.encoders import EncoderConfig
from lockstep.ops.functional import schedule
from lockstep.protocols import Loss


class A2C(Algorithm):
    """Advantage actor-critic, synchronous (Mnih et al., 2016, arXiv:1602.01783)."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Algorithm.Config):
        """Settings of A2C. Every number is for the whole run, not for one process."""

        learning_rate: float = 1e-3
        """Initial learning rate, annealed linearly to zero."""
        rollout_steps: int = 8
        """Steps of each environment between updates."""
        gamma: float = 0.99
        """Discount factor."""
        entropy_coef: float = 0.01
        """Weight of the entropy bonus."""
        encoder: EncoderConfig = EncoderConfig(hidden_sizes=(16, 32), out_features=64)
        """Encoder architecture."""

    def setup(self) -> None:
        self.actions = make_distribution(self.task.action_space)
        self.net = ActorCritic(self.task.observation_space, self.actions, self.config.encoder).to(self.runtime.device)
        adam = FusedAdam(self.net.named_parameters(), lr=self.config.learning_rate)
        self.optimizer = DistributedOptimizer(self.runtime, adam, max_grad_norm=0.5)
        self.collector = OnPolicyCollector(self, self.net, self.actions)

    def collect(self, clock: TrainState) -> Metrics:
        return self.collector.collect(clock)

    def update(self, clock: TrainState) -> Metrics:
        batch = self.collector.batch(self.config.gamma, gae_lambda=0.95)
        batch["advantage"] = standardize(self.runtime, batch["advantage"])
        rate = schedule("linear", self.config.learning_rate, clock.progress)
        return self.optimizer.step(self.loss, batch, rate)  # backward, all-reduce, clip, step

    def loss(self, batch: dict[str, Any]) -> Loss:
        """Return a sum and a count, not a mean: the division happens once, over the whole run."""
        outputs, value = self.net(batch["obs"])
        log_prob, entropy = self.actions.log_prob_and_entropy(outputs, batch["action"])
        policy_loss = -(log_prob * batch["advantage"])
        value_loss = (value - batch["return"]).square()
        loss = policy_loss + 0.5 * value_loss - self.config.entropy_coef * entropy
        sums = {"policy_loss": policy_loss.detach().sum(), "entropy": entropy.detach().sum()}
        return Loss(loss.sum(), len(value), sums)

    def policy(self) -> GreedyPolicy:
        return GreedyPolicy(self.net, self.actions)


@dataclass(frozen=True, kw_only=True)
class SnakeA2C(Recipe):
    """A2C on Snake, 5 x 5 board."""

    task: SnakeConfig = SnakeConfig(size=5, num_envs=32)
    algo: A2C.Config = A2C.Config()
    run: RunConfig = RunConfig(total_samples=200_000, log_every=20_480, eval_every=51_200)
    smoke_overrides: ClassVar[dict[str, Any]] = {"task.num_envs": 16, "run.total_samples": 2048, "run.eval_every": 1024}
