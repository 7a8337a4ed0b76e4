"""On-policy collection: step every environment, store the rollout, compute advantages.

Shapes: L local lanes, T rollout steps, E environments per lane, B = L x E local environments in lane order. A recurrent
network is trained on sequences of S steps.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.base import Algorithm
from lockstep.clock import TrainState
from lockstep.data.episode_statistics import EpisodeStatistics
from lockstep.data.rollout import Rollout, flatten_rollout
from lockstep.distributed import Runtime
from lockstep.metrics import Metrics, widen
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import ActionDistribution
from lockstep.nn.normalization import ObservationNormalizer
from lockstep.ops.functional import compute_gae, moments
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, load_into, named_leaves, tree_map, tree_where


class OnPolicyCollector:
    """Collects rollouts with an actor-critic network and computes advantages and returns from them."""

    def __init__(
        self,
        algorithm: Algorithm,
        net: ActorCritic,
        actions: ActionDistribution,
        normalizer: ObservationNormalizer | None = None,
        sequence_steps: int = 1,
    ) -> None:
        """`sequence_steps` is S: the recurrent state is stored at the start of every sequence of S steps."""
        self.runtime: Runtime = algorithm.runtime
        self.task, self.net, self.actions, self.sequence_steps = algorithm.task, net, actions, sequence_steps
        self.normalizer = normalizer or (lambda obs: obs)
        self.rollout_steps, self.envs_per_lane = algorithm.config.rollout_steps, algorithm.envs_per_lane
        lanes, device, envs = algorithm.lanes, self.runtime.device, self.task.num_envs
        self.noise = lanes.streams(f"{algorithm.stream_prefix}.noise")
        self.episodes = EpisodeStatistics(lanes.local, self.envs_per_lane, device)
        self.rollout, self.outcomes = Rollout(self.rollout_steps), Rollout(self.rollout_steps)
        self.sequence_starts = Rollout(self.rollout_steps // sequence_steps)
        """Recurrent state at the start of each sequence."""
        self.memory = net.initial_state(envs)  # [B, ...], before the next step
        self.initial_state = net.initial_state(1)
        self.truncation_values = torch.zeros(self.rollout_steps, envs, device=device)  # read where truncated
        # Decided by the environments of the whole run, so that the number of processes decides nothing.
        self.acting = nullcontext if net.prefers_fp32(lanes.num_lanes * self.envs_per_lane) else self.runtime.autocast
        self._act = self.runtime.compilation(self._act_batch, "acting")
        self._value = self.runtime.compilation(self._value_batch, "a value")

    @torch.no_grad()
    def collect(self, clock: TrainState) -> Metrics:
        """Take `rollout_steps` steps in every environment."""
        runtime, rollout, outcomes = self.runtime, self.rollout, self.outcomes
        shape, device = (self.rollout_steps, self.envs_per_lane), runtime.device
        noise = self.actions.sample_noise(self.noise, clock.iteration, *shape, device=device)  # [L, T, E, ...]
        noise = noise.transpose(0, 1).flatten(1, 2)  # [T, B, ...]
        obs = self.task.observations()
        for t, draws in enumerate(noise.unbind(0)):
            with runtime.phase("act"):
                if self.memory and t % self.sequence_steps == 0:
                    self.sequence_starts.write(t // self.sequence_steps, {"memory": self.memory})
                policy_step = runtime.map_lanes(self._act, {"obs": obs, "noise": draws, "memory": self.memory})
                memory = policy_step.pop("memory")
                rollout.write(t, {"obs": obs, **policy_step})
            with runtime.phase("env"):
                step = self.task.step(policy_step["action"])
            outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
            outcome |= {} if step.active is None else {"active": step.active}
            outcomes.write(t, {**outcome, **step.episode_info})
            if step.any_truncated:
                # Bootstrap truncated episodes from their final observation, not from the reset observation.
                self.truncation_values[t] = runtime.map_lanes(self._value, {"obs": step.final_obs, "memory": memory})
            obs, self.memory = step.obs, tree_where(step.terminated | step.truncated, self.initial_state, memory)
        self.last_value = runtime.map_lanes(self._value, {"obs": obs, "memory": self.memory})  # [B]
        ended = outcomes["terminated"] | outcomes["truncated"]
        extras = {name: outcomes[name] for name in step.episode_info}
        active = None if step.active is None else outcomes["active"]
        return self.episodes.count(outcomes["reward"], ended, extras, active)

    def _act_batch(self, part: dict[str, Any]) -> Tree:
        with self.acting():
            outputs, value, memory = self.net.step(self.normalizer(part["obs"]), part["memory"])
        action = self.actions.sample(outputs, part["noise"])
        return {"action": action, "outputs": outputs, "value": value, "memory": memory}

    def _value_batch(self, part: dict[str, Any]) -> Tensor:
        with self.acting():
            return self.net.value(self.normalizer(part["obs"]), part["memory"])

    @torch.no_grad()
    def batch(self, gamma: float, gae_lambda: float, rewards: Tensor | None = None) -> dict[str, Any]:
        """Return the rollout with `advantage` and `return` (GAE) as samples [L x T x E, ...].

        If rows may be inactive, `active` is 0 for them, and so are their advantages, returns and values.
        """
        values, terminated, truncated = self.rollout["value"], self.outcomes["terminated"], self.outcomes["truncated"]
        next_value = torch.cat([values[1:], self.last_value.unsqueeze(0)])  # [T, B]
        next_value = torch.where(truncated, self.truncation_values, next_value)
        rewards = self.outcomes["reward"] if rewards is None else rewards
        advantage = compute_gae(rewards, values, next_value, terminated, terminated | truncated, gamma, gae_lambda)
        estimates = {"advantage": advantage, "return": advantage + values, "value": values}
        if "active" in self.outcomes.buffers:
            active = self.outcomes["active"].float()
            estimates = {name: x * active for name, x in estimates.items()} | {"active": active}
        return dict(flatten_rollout(self.rollout.buffers | estimates, len(self.runtime.lanes)))

    def to_sequences(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Regroup samples into sequences [L x T/S x E, S, ...], with recurrent states and episode starts."""
        lanes, ended = len(self.runtime.lanes), self.outcomes["terminated"] | self.outcomes["truncated"]
        starts = torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])  # [T, B], of episodes within the rollout
        shape = (lanes, self.rollout_steps // self.sequence_steps, self.sequence_steps, -1)
        steps = batch | {"starts": flatten_rollout(starts, lanes)}
        rows = tree_map(lambda x: x.unflatten(0, shape).transpose(2, 3).flatten(0, 2), steps)
        return dict(rows | {"memory": flatten_rollout(self.sequence_starts["memory"], lanes)})

    @property
    def buffers(self) -> dict[str, Any]:
        """The buffers of collected samples."""
        rollouts = {"rollout": self.rollout, "outcomes": self.outcomes, "memories": self.sequence_starts}
        return {name: rollout.buffers for name, rollout in rollouts.items()} | {"cut_values": self.truncation_values}

    def lane_state(self, lane: int) -> StateDict:
        index = self.runtime.lanes.local.index(lane)
        memory = tree_map(lambda x: x.unflatten(0, (-1, self.envs_per_lane))[index], self.memory)
        return {**named_leaves(memory, "memory"), **self.episodes.lane_state(lane)}

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        load_into(self.lane_state(lane), state, f"lane {lane}")


def standardize(runtime: Runtime, values: Tensor) -> Tensor:
    """Shift and scale samples [L x N] to zero mean and unit variance over the whole run."""
    # Sum per lane, so that the result does not depend on which lanes share a process.
    lanes = widen(values).chunk(len(runtime.lanes))
    sums = [torch.stack([x.sum(), x.square().sum(), x.new_tensor(float(len(x)))]) for x in lanes]
    mean, variance = moments(*runtime.exact_sum(torch.stack(sums)))
    return ((values - mean) / (variance.sqrt() + 1e-8)).float()
