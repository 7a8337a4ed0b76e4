"""Settings of DDPG and TD3."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gymnasium.spaces import Discrete

from lockstep.algorithms.ddpg.networks import AgentAxis
from lockstep.algorithms.off_policy import check_replay_settings, updates_until
from lockstep.base import Algorithm
from lockstep.config import ConfigError, RunConfig
from lockstep.data.replay_buffer import ReplayConfig
from lockstep.nn.encoders import EncoderConfig
from lockstep.nn.q_networks import ActionInput
from lockstep.ops.functional import Scaling, Schedule


@dataclass(frozen=True, kw_only=True)
class DDPGConfig(Algorithm.Config):
    """Settings of DDPG. Every number is for the whole run, not for one process."""

    actor_lr: float = 1e-3
    """Learning rate of the actor."""
    critic_lr: float = 1e-3
    """Learning rate of the critics."""
    schedule: Schedule = "constant"
    """Change of both learning rates over the run: constant, or down to 0 (linear, cosine)."""
    lr_scaling: Scaling = "none"
    """Scaling of learning rates with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that learning rates were tuned for. None: the recipe's own."""
    batch_size: int = 256
    """Samples per update, over all processes."""
    buffer_size: int = 200_000
    """Capacity of the replay buffer, in samples over all processes."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Storage of the replay buffer."""
    learning_starts: int = 1_000
    """Samples in the replay buffer before learning starts. Until then actions are random."""
    rollout_steps: int = 1
    """Steps each environment takes between updates."""
    updates_per_sample: float = 1.0
    """Updates per sample once learning has started."""
    gamma: float = 0.99
    """Discount factor."""
    n_step: int = 1
    """Number of rewards in a target before the bootstrapped value."""
    tau: float = 0.005
    """Coefficient of the soft update of the target networks."""
    twin_critics: bool = False
    """Whether to train two critics and use the lower value in targets."""
    policy_delay: int = 1
    """Critic updates per update of the actor and the target networks."""
    target_noise: float = 0.0
    """Standard deviation of the noise on continuous target actions, clipped at 0.5. Discrete: scale of Gumbel noise."""
    centralized_critic: bool = False
    """Whether a critic sees the observations and actions of the whole team."""
    exploration_noise: float = 0.1
    """Standard deviation of exploration noise on continuous actions. Discrete: sampled from the actor's softmax."""
    epsilon: float = 0.1
    """Probability of a random action when learning starts."""
    epsilon_end: float = 0.0
    """Probability of a random action after `epsilon_decay_fraction` of the run."""
    epsilon_schedule: Literal["linear", "exponential"] = "linear"
    """Change of `epsilon` to `epsilon_end`: by equal steps, or by an equal factor per sample."""
    epsilon_decay_fraction: float = 0.5
    """Fraction of the run over which `epsilon` changes to `epsilon_end`."""
    gumbel_temperature: float = 1.0
    """Temperature of the softmax that passes gradients to discrete actions."""
    actor_gradient: Literal["sampled", "expected"] = "sampled"
    """Gradient of the actor for discrete actions. sampled: through one action drawn with Gumbel noise. expected: of
    the mean value of all actions, weighted by their probabilities; without noise, but not for a centralized critic."""
    logit_penalty: float = 1e-3
    """Weight of the squared logits of discrete actions. Keeps the actor from becoming deterministic too early."""
    opponent_pool_size: int = 0
    """Snapshots of the actor to play against, if the task lets the algorithm control both teams. 0: only scripts."""
    self_play_fraction: float = 0.5
    """Fraction of the environments that play against snapshots."""
    snapshot_every: int = 100_000
    """Samples between snapshots. A new snapshot replaces the oldest one."""
    opponent_sampling: Literal["uniform", "pfsp"] = "uniform"
    """Choice of snapshots. uniform: in rotation. pfsp: drawn for each game, more often the lower the win rate."""
    pfsp_power: float = 2.0
    """Exponent p of the weights (1 - win rate)^p of pfsp. 0: all snapshots are equally likely."""
    max_grad_norm: float | None = 10.0
    """Maximum norm of the gradient of the whole batch. None: no clipping."""
    grad_accum_steps: int = 1
    """Micro-batches per batch, to save memory. One optimizer step is taken for all of them."""
    encoder: EncoderConfig = field(default_factory=lambda: EncoderConfig(hidden_sizes=(256,), activation="relu"))
    """Encoder architecture of each network."""
    critic_action_input: ActionInput = "last"
    """Hidden layer of the critics that receives the action. last: one more layer after the encoder. first: the encoder
    itself, which sees the observation and the action (vector observations; others use last)."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = (
        *(
            "actor_lr",
            "critic_lr",
            "schedule",
            "batch_size",
            "updates_per_sample",
            "gamma",
            "n_step",
            "tau",
            "policy_delay",
        ),
        *("target_noise", "exploration_noise", "epsilon", "epsilon_end", "epsilon_schedule"),
        *("epsilon_decay_fraction", "lr_scaling", "grad_accum_steps"),
        *("gumbel_temperature", "actor_gradient", "logit_penalty", "snapshot_every", "max_grad_norm"),
    )

    def validate(self, task: Any, run: RunConfig) -> None:
        """Raise ConfigError for invalid settings, before any process starts."""
        super().validate(task, run)
        check_replay_settings(self, task, run)
        if self.policy_delay < 1:
            raise ConfigError(f"policy_delay is {self.policy_delay}.", "Use 1 or more.")
        if self.actor_gradient == "expected" and self.centralized_critic:
            raise ConfigError(
                "actor_gradient is expected, but a centralized critic has no value for each action of one agent.",
                "Use --algo.actor-gradient sampled, or no centralized critic.",
            )
        if self.epsilon_schedule == "exponential" and min(self.epsilon, self.epsilon_end) <= 0:
            raise ConfigError(
                f"epsilon is {self.epsilon} and epsilon_end {self.epsilon_end}, but an exponential schedule never "
                "reaches 0.",
                "Use --algo.epsilon-end 0.01, or --algo.epsilon-schedule linear.",
            )
        if self.opponent_pool_size and not getattr(task, "control_both_teams", False):
            raise ConfigError(
                f"opponent_pool_size is {self.opponent_pool_size}, but the task acts for the other team itself.",
                "Use --algo.opponent-pool-size 0, or a task with two teams and --task.control-both-teams.",
            )
        if self.opponent_pool_size < 0 or self.snapshot_every < 1 or not 0 <= self.self_play_fraction <= 1:
            raise ConfigError(
                f"opponent_pool_size is {self.opponent_pool_size}, snapshot_every {self.snapshot_every}, "
                f"self_play_fraction {self.self_play_fraction}.",
                "Use 0 or more snapshots, an interval of 1 or more, and a fraction from 0 to 1.",
            )
        if self.opponent_sampling == "pfsp" and (not self.opponent_pool_size or self.pfsp_power < 0):
            raise ConfigError(
                f"opponent_sampling is pfsp, with opponent_pool_size {self.opponent_pool_size} and pfsp_power "
                f"{self.pfsp_power}.",
                "Use 1 or more snapshots, and a power of 0 or more.",
            )
        scripted = 1 - (self.self_play_fraction if self.opponent_pool_size else 0)
        if getattr(task, "submissions", ()) and task.submission_fraction > scripted:
            raise ConfigError(
                f"task.submission_fraction is {task.submission_fraction}, but {self.self_play_fraction} of the games "
                "are played against the opponent pool.",
                "Use at most 1 in total: lower --algo.self-play-fraction or --task.submission-fraction.",
            )

    def check_task(self, task: Any) -> None:
        team = AgentAxis(task)
        self.encoder.check_image_size(team.agent_space)
        if self.actor_gradient == "expected" and not isinstance(team.action_space, Discrete):
            raise ConfigError(
                f"actor_gradient is expected, but actions of {team.action_space} are not discrete.",
                "Use --algo.actor-gradient sampled.",
            )

    def updates_until(self, samples: int) -> int:
        """Return the updates due after `samples` samples."""
        return updates_until(samples, self.learning_starts, self.updates_per_sample)

    def epsilon_at(self, progress: float) -> float:
        """Return the probability of a random action at a progress from 0 to 1."""
        fraction = min(1.0, progress / self.epsilon_decay_fraction) if self.epsilon_decay_fraction > 0 else 1.0
        if self.epsilon_schedule == "exponential":
            return self.epsilon * (self.epsilon_end / self.epsilon) ** fraction
        return self.epsilon + fraction * (self.epsilon_end - self.epsilon)
