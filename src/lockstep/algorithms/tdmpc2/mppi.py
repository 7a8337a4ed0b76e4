"""Planning in a world model: MPPI, for all environments at once.

Sequences of actions are drawn around a mean, and some from the policy; the model tells what each would bring; the best
draw the mean towards them. A few rounds of that, and one of the best is taken. All noise is handed in.

Shapes: B environments, S sequences, P of them from the policy, J elites, H steps ahead, K action features, R rounds.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.algorithms.tdmpc2.world_model import WorldModel
from lockstep.config import ConfigError
from lockstep.ops.functional import two_hot_inverse
from lockstep.ops.philox.draws import Device
from lockstep.pytree import Tree, tree_map
from lockstep.rng import LaneStreams, RandomStream

CACHED = 512
"""Sequences that a CPU follows at once: more do not fit into its cache, and one environment after another is faster."""
MANY_ACTIONS = 20
"""From so many action features on, two rounds are added."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How hard to think about an action."""

    num_samples: int = 512
    """Sequences of actions that are tried in a round."""
    num_policy_samples: int = 24
    """How many of them the policy proposes."""
    num_elites: int = 64
    """How many of them, the best ones, make the next round."""
    iterations: int = 6
    """Rounds; two more from 20 action features on."""
    temperature: float = 0.5
    """How much more the better elites count than the worse."""
    min_std: float = 0.05
    """Least deviation of the actions that are tried."""
    max_std: float = 2.0
    """Largest, with which the first round begins."""

    def validate(self) -> None:
        """Refuse numbers that cannot be, in words."""
        if (
            not 0 <= self.num_policy_samples < self.num_samples
            or not 1 <= self.num_elites <= self.num_samples
            or self.iterations < 1
        ):
            raise ConfigError(
                f"of {self.num_samples} samples {self.num_policy_samples} are from the policy and {self.num_elites} "
                "elites.",
                "Use fewer of both than samples, and one round or more.",
            )

    def rounds_for(self, actions: int) -> int:
        return self.iterations + 2 * (actions >= MANY_ACTIONS)


class Elites(NamedTuple):
    """The best sequences, how much each counts, and what they amount to."""

    actions: Tensor
    """[B, J, H, K]."""
    weights: Tensor
    """[B, J] of sum 1."""
    mean: Tensor
    """[B, H, K]."""
    std: Tensor
    """[B, H, K]."""


def choose_elites(values: Tensor, actions: Tensor, count: int, temperature: float) -> Elites:
    """The `count` sequences [B, S, H, K] of highest values [B, S], weighted by a softmax of their values."""
    best, places = values.topk(count, dim=1)
    chosen = actions.gather(1, places[:, :, None, None].expand(-1, -1, *actions.shape[2:]))
    weights = (temperature * (best - best[:, :1])).softmax(1)
    mean = torch.einsum("bj,bjhk->bhk", weights, chosen)
    variance = torch.einsum("bj,bjhk->bhk", weights, (chosen - mean.unsqueeze(1)).square())
    return Elites(chosen, weights, mean, variance.sqrt())


def seen_of(obs: Any) -> tuple[Tensor, Tensor | None]:
    """What is seen, and the number of the task where there are several."""
    return (obs["obs"], obs["task"]) if isinstance(obs, dict) else (obs, None)


def sample_critic_pairs(stream: RandomStream, counter: int, count: int, critics: int, device: Device = "cpu") -> Tensor:
    """Two different critics, `count` times, the same on every lane; [count, 2]."""
    return stream.permutation(counter, count, critics, device=device)[:, :2]


def shift_mean(mean: Tensor) -> Tensor:
    """What a plan [B, H, K] leaves for the next one: its steps but the first, and nothing known of the last."""
    return torch.cat([mean[:, 1:], torch.zeros_like(mean[:, :1])], dim=1)


def draw(
    normal: LaneStreams,
    gumbel: LaneStreams,
    counter: int,
    envs: int,
    config: PlanConfig,
    steps: int,
    actions: int,
    device: Device = "cpu",
) -> dict[str, Any]:
    """The noise of one plan in each environment, [B, ...]: one draw for each lane, cut into what it is for."""
    rounds = config.rounds_for(actions)
    shapes = {
        "sequences": (rounds, config.num_samples - config.num_policy_samples, steps, actions),
        "policy": (config.num_policy_samples, steps, actions),
        "last": (rounds, config.num_samples, actions),
        "action": (actions,),
    }
    sizes = [math.prod(shape) for shape in shapes.values()]
    drawn = normal.normal(counter, envs, sum(sizes), device=device).flatten(0, 1)
    parts = dict(zip(shapes, drawn.split(sizes, dim=1), strict=True))
    noise: dict[str, Any] = {name: part.unflatten(1, shapes[name]) for name, part in parts.items()}
    return noise | {"elite": gumbel.gumbel(counter, envs, config.num_elites, device=device).flatten(0, 1)}


class Planner:
    """Plans with a model, which goes on learning."""

    def __init__(self, model: WorldModel, config: PlanConfig, steps: int, discounts: Tensor) -> None:
        """`discounts` are those of the tasks."""
        self.model, self.config, self.steps, self.discounts = model, config, steps, discounts
        self.rounds = config.rounds_for(model.actions)

    def plan(
        self, obs: Tensor, task: Tensor | None, mean: Tensor, noise: dict[str, Any], pairs: Tensor, explore: bool
    ) -> tuple[Tensor, Tensor]:
        """An action [B, K] and the mean [B, H, K] of the last round, from what the plan before left.

        `pairs` [R, 2] are the critics that are asked in each round.
        """
        count, at_once = len(obs), len(obs)
        if obs.device.type == "cpu":
            at_once = max(1, CACHED // self.config.num_samples)
        plans = []
        for start in range(0, count, at_once):
            own = slice(start, start + at_once)
            mine = tree_map(lambda x, own=own: x[own], noise)
            plans.append(self._plan(obs[own], None if task is None else task[own], mean[own], mine, pairs, explore))
        actions, means = zip(*plans, strict=True)
        return torch.cat(actions), torch.cat(means)

    def _plan(
        self, obs: Tensor, task: Tensor | None, mean: Tensor, noise: dict[str, Any], pairs: Tensor, explore: bool
    ) -> tuple[Tensor, Tensor]:
        model, config = self.model, self.config
        z = model.encode(obs, task).unsqueeze(1)  # [B, 1, Z]
        tasks = None if task is None else task.unsqueeze(1)
        proposed = self._propose(z, tasks, noise["policy"])
        std = torch.full_like(mean, config.max_std)
        for number in range(self.rounds):
            around = mean.unsqueeze(1) + std.unsqueeze(1) * noise["sequences"][:, number]
            actions = torch.cat([proposed, around.clamp(-1.0, 1.0)], dim=1)  # [B, S, H, K]
            if tasks is not None:
                actions = actions * model.mask(tasks).unsqueeze(2)
            values = self.value(z, actions, tasks, noise["last"][:, number], pairs[number])
            elites = choose_elites(values.nan_to_num(0.0), actions, config.num_elites, config.temperature)
            mean, std = elites.mean, elites.std.clamp(config.min_std, config.max_std)
            if task is not None:
                std = std * model.mask(task).unsqueeze(1)
        taken = (elites.weights.log() + noise["elite"]).argmax(1)  # a draw by weight
        action = elites.actions[torch.arange(len(taken), device=taken.device), taken, 0]
        if explore:
            action = action + std[:, 0] * noise["action"]
        return action.clamp(-1.0, 1.0), mean

    def value(self, z: Tensor, actions: Tensor, task: Tensor | None, noise: Tensor, pair: Tensor) -> Tensor:
        """What sequences [B, S, H, K] bring from latents [B, 1, Z] on: rewards, and what critics say of the end."""
        model, samples = self.model, actions.shape[1]
        z = z.expand(-1, samples, -1)
        tasks = None if task is None else task.expand(-1, samples)
        total, weight = z.new_zeros(z.shape[:-1]), z.new_ones(z.shape[:-1])
        discount = self.discounts[0] if tasks is None else self.discounts[tasks]
        for action in actions.unbind(2):
            joint = model.joint(z, action, tasks)
            total = total + weight * two_hot_inverse(model.reward(joint), model.reach)
            z, weight = model.dynamics(joint), weight * discount
            if model.termination is not None:
                weight = weight * (model.termination_logit(z, tasks) <= 0.0)
        last = model.act(z, noise, tasks).action
        return total + weight * model.q_value(model.critics, z, last, tasks, pair).mean(0)

    def _propose(self, z: Tensor, task: Tensor | None, noise: Tensor) -> Tensor:
        """Sequences [B, P, H, K] that the policy would take."""
        z = z.expand(-1, noise.shape[1], -1)
        tasks = None if task is None else task.expand(-1, noise.shape[1])
        actions = []
        for step in range(self.steps):
            actions.append(self.model.act(z, noise[:, :, step], tasks).action)
            if step < self.steps - 1:
                z = self.model.dynamics(self.model.joint(z, actions[-1], tasks))
        return torch.stack(actions, dim=2)


class PriorPolicy:
    """What the model's own policy does, without noise and without planning."""

    def __init__(self, model: WorldModel, middle: Tensor, reach: Tensor) -> None:
        """Actions are `middle` and up to `reach` beside it."""
        self.model, self.middle, self.reach = model, middle, reach

    def initial_state(self, count: int) -> Tree:
        return {}

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        action, _, after = self.forward(obs, memory)
        return action, after

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        seen, task = seen_of(obs)
        z = self.model.encode(seen, task)
        action = self.model.act(z, z.new_zeros(z.shape[0], self.model.actions), task).action
        return action * self.reach + self.middle, action, memory


class PlanningPolicy:
    """What is planned for each observation, with the same noise every time: nothing is left to chance."""

    def __init__(self, planner: Planner, middle: Tensor, reach: Tensor) -> None:
        self.planner, self.middle, self.reach = planner, middle, reach
        self.prior = PriorPolicy(planner.model, middle, reach)
        """What can be taken away without the planner."""
        normal, gumbel = (LaneStreams((RandomStream(0, f"planning.{kind}"),)) for kind in ("normal", "gumbel"))
        model = planner.model
        device = middle.device
        self.noise = draw(normal, gumbel, 0, 1, planner.config, planner.steps, model.actions, device)
        self.pairs = sample_critic_pairs(
            RandomStream(0, "planning.pairs"), 0, planner.rounds, model.critics.count, device
        )

    def initial_state(self, count: int) -> Tree:
        return {"plan": torch.zeros(count, self.planner.steps, self.planner.model.actions, device=self.middle.device)}

    def act(self, obs: Tree, memory: Any) -> tuple[Tensor, Tree]:
        action, _, after = self.forward(obs, memory)
        return action, after

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Any) -> tuple[Tensor, Tensor, Tree]:
        seen, task = seen_of(obs)
        noise = tree_map(lambda x: x.expand(len(seen), *x.shape[1:]), self.noise)
        action, mean = self.planner.plan(seen, task, shift_mean(memory["plan"]), noise, self.pairs, explore=False)
        return action * self.reach + self.middle, action, {"plan": mean}
