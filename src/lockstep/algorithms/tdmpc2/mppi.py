"""Model predictive path integral control (MPPI) in a world model, for all environments at once.

Each iteration samples action sequences around a mean, adds some from the policy, and estimates their returns with the
model. The best ones (elites) define the next mean. The action is that of a random elite. All noise is passed in.

Shapes: B environments, S sequences, P of them from the policy, J elites, H horizon, K action features, R iterations.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.algorithms.tdmpc2.world_model import WorldModel
from lockstep.config import ConfigError
from lockstep.ops.philox.draws import Device
from lockstep.ops.two_hot import two_hot_inverse
from lockstep.protocols import Policy
from lockstep.pytree import Tree, tree_map
from lockstep.rng import LaneStreams, RandomStream

MAX_CPU_SEQUENCES = 512
"""Maximum number of sequences evaluated at once on a CPU. More do not fit into its cache and are slower."""
MANY_ACTIONS = 20
"""Number of action features from which on two iterations are added."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Settings of the planner."""

    num_samples: int = 512
    """Action sequences per iteration."""
    num_policy_samples: int = 24
    """Action sequences that are sampled from the policy."""
    num_elites: int = 64
    """Best sequences, which define the mean and standard deviation of the next iteration."""
    iterations: int = 6
    """MPPI iterations; two more from 20 action features on."""
    temperature: float = 0.5
    """Factor on the values in the softmax that weights elites. Larger values favor the best elites."""
    min_std: float = 0.05
    """Minimum standard deviation of sampled actions."""
    max_std: float = 2.0
    """Maximum standard deviation of sampled actions, and the one of the first iteration."""

    def validate(self) -> None:
        """Raise ConfigError for invalid settings."""
        if (
            not 0 <= self.num_policy_samples < self.num_samples
            or not 1 <= self.num_elites <= self.num_samples
            or self.iterations < 1
        ):
            raise ConfigError(
                f"num_samples is {self.num_samples}, num_policy_samples {self.num_policy_samples} and num_elites "
                f"{self.num_elites}.",
                "Use fewer policy samples than samples, 1 to num_samples elites, and 1 iteration or more.",
            )


def choose_elites(
    values: Tensor, actions: Tensor, count: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the `count` sequences of `actions` [B, S, H, K] with the highest values [B, S].

    Return them [B, J, H, K], their weights [B, J], which are a softmax of their values, and the weighted mean and
    standard deviation [B, H, K].
    """
    best, indices = values.topk(count, dim=1)
    elites = actions.gather(1, indices[:, :, None, None].expand(-1, -1, *actions.shape[2:]))
    weights = (temperature * (best - best[:, :1])).softmax(1)
    mean = torch.einsum("bj,bjhk->bhk", weights, elites)
    variance = torch.einsum("bj,bjhk->bhk", weights, (elites - mean.unsqueeze(1)).square())
    return elites, weights, mean, variance.sqrt()


def split_obs(obs: Any) -> tuple[Tensor, Tensor | None]:
    """Split observations into the tensor for the encoder and the task indices, None for a single task."""
    if not isinstance(obs, dict):
        return obs, None
    return (obs["obs"], obs["task"]) if obs.keys() == {"obs", "task"} else (torch.cat(list(obs.values()), -1), None)


def sample_critic_pairs(stream: RandomStream, counter: int, count: int, critics: int, device: Device = "cpu") -> Tensor:
    """Draw `count` pairs of different critics, the same on every lane; [count, 2]."""
    return stream.permutation(counter, count, critics, device=device)[:, :2]


def shift_mean(mean: Tensor) -> Tensor:
    """Shift a plan [B, H, K] by one step to initialize the next one. The new last step is zero."""
    return torch.cat([mean[:, 1:], torch.zeros_like(mean[:, :1])], dim=1)


class Planner:
    """Planner that uses the current weights of a model."""

    def __init__(self, model: WorldModel, config: PlanConfig, steps: int, discounts: Tensor) -> None:
        """Create a planner with the discount factors of all tasks."""
        self.model, self.config, self.steps, self.discounts = model, config, steps, discounts
        self.iterations = config.iterations + 2 * (model.actions >= MANY_ACTIONS)

    def draw_noise(self, normal: LaneStreams, gumbel: LaneStreams, counter: int, envs: int) -> dict[str, Any]:
        """Draw the noise of one plan per environment, [B, ...]: one draw per lane, split by purpose."""
        config, actions, device = self.config, self.model.actions, self.discounts.device
        shapes = {
            "sequences": (self.iterations, config.num_samples - config.num_policy_samples, self.steps, actions),
            "policy": (config.num_policy_samples, self.steps, actions),
            "last": (self.iterations, config.num_samples, actions),
            "action": (actions,),
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        drawn = normal.normal(counter, envs, sum(sizes), device=device).flatten(0, 1).split(sizes, dim=1)
        noise: dict[str, Any] = {name: x.unflatten(1, shapes[name]) for name, x in zip(shapes, drawn, strict=True)}
        return noise | {"elite": gumbel.gumbel(counter, envs, config.num_elites, device=device).flatten(0, 1)}

    def draw_pairs(self, stream: RandomStream, counter: int) -> Tensor:
        """Draw the critics of each iteration of one plan, [R, 2]."""
        return sample_critic_pairs(stream, counter, self.iterations, self.model.critics.count, self.discounts.device)

    def plan(
        self, obs: Tensor, task: Tensor | None, mean: Tensor, noise: dict[str, Any], pairs: Tensor, explore: bool
    ) -> tuple[Tensor, Tensor]:
        """Return actions [B, K] and the mean [B, H, K] of the last iteration, starting from the given mean.

        `pairs` [R, 2] are the critics of each iteration.
        """
        chunk = max(1, MAX_CPU_SEQUENCES // self.config.num_samples) if obs.device.type == "cpu" else len(obs)
        plans = []
        for start in range(0, len(obs), chunk):
            rows = slice(start, start + chunk)
            part = tree_map(lambda x, rows=rows: x[rows], noise)
            plans.append(self._plan(obs[rows], None if task is None else task[rows], mean[rows], part, pairs, explore))
        actions, means = zip(*plans, strict=True)
        return torch.cat(actions), torch.cat(means)

    def _plan(
        self, obs: Tensor, task: Tensor | None, mean: Tensor, noise: dict[str, Any], pairs: Tensor, explore: bool
    ) -> tuple[Tensor, Tensor]:
        model, config = self.model, self.config
        z = model.encode(obs, task).unsqueeze(1)  # [B, 1, Z]
        tasks = None if task is None else task.unsqueeze(1)
        policy_actions = self._policy_sequences(z, tasks, noise["policy"])
        std = torch.full_like(mean, config.max_std)
        for number in range(self.iterations):
            # Sample action sequences
            sampled = mean.unsqueeze(1) + std.unsqueeze(1) * noise["sequences"][:, number]
            actions = torch.cat([policy_actions, sampled.clamp(-1.0, 1.0)], dim=1)  # [B, S, H, K]
            if tasks is not None:
                actions = actions * model.mask(tasks).unsqueeze(2)
            # Estimate returns; elites define the next distribution
            values = self.value(z, actions, tasks, noise["last"][:, number], pairs[number]).nan_to_num(0.0)
            elites, weights, mean, std = choose_elites(values, actions, config.num_elites, config.temperature)
            std = std.clamp(config.min_std, config.max_std)
            if task is not None:
                std = std * model.mask(task).unsqueeze(1)
        # First action of one elite, sampled by weight (Gumbel-max)
        index = (weights.log() + noise["elite"]).argmax(1)
        action = elites[torch.arange(len(index), device=index.device), index, 0]
        if explore:
            action = action + std[:, 0] * noise["action"]
        return action.clamp(-1.0, 1.0), mean

    def value(self, z: Tensor, actions: Tensor, task: Tensor | None, noise: Tensor, pair: Tensor) -> Tensor:
        """Estimate the returns of sequences [B, S, H, K] from latents [B, 1, Z]: rewards plus the final value."""
        model, samples = self.model, actions.shape[1]
        z = z.expand(-1, samples, -1)
        tasks = None if task is None else task.expand(-1, samples)
        total, weight = z.new_zeros(z.shape[:-1]), z.new_ones(z.shape[:-1])
        discount = self.discounts[0] if tasks is None else self.discounts[tasks]
        # Predicted rewards along each sequence
        for action in actions.unbind(2):
            joint = model.joint(z, action, tasks)
            total = total + weight * two_hot_inverse(model.reward(joint), model.vmax)
            z, weight = model.dynamics(joint), weight * discount
            if model.termination is not None:
                weight = weight * (model.termination_logit(z, tasks) <= 0.0)
        # Value of the policy's action at the end
        last = model.act(z, noise, tasks).action
        return total + weight * model.q_value(model.critics, z, last, tasks, pair).mean(0)

    def _policy_sequences(self, z: Tensor, task: Tensor | None, noise: Tensor) -> Tensor:
        """Return action sequences [B, P, H, K] of the policy, rolled out in the model."""
        z = z.expand(-1, noise.shape[1], -1)
        tasks = None if task is None else task.expand(-1, noise.shape[1])
        actions = []
        for step in range(self.steps):
            actions.append(self.model.act(z, noise[:, :, step], tasks).action)
            if step < self.steps - 1:
                z = self.model.dynamics(self.model.joint(z, actions[-1], tasks))
        return torch.stack(actions, dim=2)


class PriorPolicy(Policy):
    """Mean actions of the model's policy, without planning."""

    def __init__(self, model: WorldModel, action_bias: Tensor, action_scale: Tensor) -> None:
        """Create a policy with actions from `action_bias - action_scale` to `action_bias + action_scale`."""
        self.model, self.action_bias, self.action_scale = model, action_bias, action_scale

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        inputs, task = split_obs(obs)
        z = self.model.encode(inputs, task)
        action = self.model.act(z, z.new_zeros(z.shape[0], self.model.actions), task).action
        return action * self.action_scale + self.action_bias, action, memory

    @torch.no_grad()
    def sample(self, obs: Tree, memory: Tree, seed: int, counter: int) -> tuple[Tensor, Tree]:
        inputs, task = split_obs(obs)
        noise = RandomStream(seed, "policy.noise").normal(
            counter, len(inputs), self.model.actions, device=self.action_bias.device
        )
        action = self.model.act(self.model.encode(inputs, task), noise, task).action
        return action * self.action_scale + self.action_bias, memory


class PlanningPolicy(Policy):
    """Planned actions. The noise of `act` is fixed, so that its actions are deterministic."""

    def __init__(self, planner: Planner, action_bias: Tensor, action_scale: Tensor) -> None:
        self.planner, self.action_bias, self.action_scale = planner, action_bias, action_scale
        self.prior = PriorPolicy(planner.model, action_bias, action_scale)
        """Policy for export, without the planner."""
        normal, gumbel = (LaneStreams((RandomStream(0, f"planning.{kind}"),)) for kind in ("normal", "gumbel"))
        self.noise = planner.draw_noise(normal, gumbel, 0, envs=1)
        self.pairs = planner.draw_pairs(RandomStream(0, "planning.pairs"), 0)

    def initial_state(self, count: int) -> Tree:
        shape = (count, self.planner.steps, self.planner.model.actions)
        return {"plan": torch.zeros(shape, device=self.action_bias.device)}

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Any) -> tuple[Tensor, Tensor, Tree]:
        inputs, task = split_obs(obs)
        noise = tree_map(lambda x: x.expand(len(inputs), *x.shape[1:]), self.noise)
        action, mean = self.planner.plan(inputs, task, shift_mean(memory["plan"]), noise, self.pairs, explore=False)
        return action * self.action_scale + self.action_bias, action, {"plan": mean}

    @torch.no_grad()
    def sample(self, obs: Tree, memory: Any, seed: int, counter: int) -> tuple[Tensor, Tree]:
        inputs, task = split_obs(obs)
        normal, gumbel = (LaneStreams((RandomStream(seed, f"policy.{kind}"),)) for kind in ("noise", "choice"))
        noise = self.planner.draw_noise(normal, gumbel, counter, len(inputs))
        pairs = self.planner.draw_pairs(RandomStream(seed, "policy.pairs"), counter)
        action, mean = self.planner.plan(inputs, task, shift_mean(memory["plan"]), noise, pairs, explore=True)
        return action * self.action_scale + self.action_bias, {"plan": mean}
