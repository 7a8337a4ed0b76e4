"""Policy and value function in one module, with a shared encoder (and recurrent layer) or separate ones.

Shapes: N samples, O outputs of the policy. For recurrent networks, samples are sequences one after another: see
`nn/recurrent.py`.
"""

from typing import Any

import torch
from gymnasium import Space
from torch import Tensor, nn

from lockstep.nn.distributions import ActionDistribution, mask_logits
from lockstep.nn.encoders import EncoderConfig, orthogonal_init
from lockstep.nn.recurrent import PaddedSegments, Recurrent, RecurrentConfig
from lockstep.pytree import Tree
from lockstep.space_layout import network_space, policy_obs, split_mask

BF16_MIN_MACS = 30_000_000
"""Multiply-adds below which a dense network is faster in fp32 than in bf16 on a CPU (widths 128 to 1,024)."""


class ActorCritic(nn.Module):
    """Actor-critic network. By default, policy and value share a CNN encoder, but have separate MLP encoders."""

    def __init__(
        self,
        observations: Space,
        actions: ActionDistribution,
        config: EncoderConfig,
        memory: RecurrentConfig | None = None,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        # No encoder sees the action mask, which is applied to the outputs. Only the critic's sees the critic part.
        choices = actions.num_params - actions.num_free_params
        self.encoder = config.build(network_space(policy_obs(observations), choices))
        shared = config.is_shared(self.encoder, observations)
        self.critic_encoder = None if shared else config.build(network_space(observations, choices))
        encoders = {"policy": self.encoder} | ({} if self.critic_encoder is None else {"value": self.critic_encoder})
        features = {name: int(encoder.features) for name, encoder in encoders.items()}  # type: ignore[arg-type]
        self.memories = nn.ModuleDict()
        if memory is not None and memory.kind != "none":
            self.memories.update({name: Recurrent(memory, size) for name, size in features.items()})
            features = dict.fromkeys(features, memory.hidden_size)
        self.policy_head = orthogonal_init(nn.Linear(features["policy"], actions.num_params), 0.01)
        self.value_head = orthogonal_init(nn.Linear(features.get("value", features["policy"]), 1), 1.0)
        free = torch.full((actions.num_free_params,), log_std_init)
        self.log_std = nn.Parameter(free) if actions.num_free_params else None

    def forward(self, obs: Tree, memory: Any = None, segments: PaddedSegments | None = None) -> tuple[Tensor, Tensor]:
        """Return outputs for the action distribution [N, O] and values [N], both fp32 for any autocast dtype.

        A recurrent network needs its state before each sequence, and the split of the sequences at episode starts.
        """
        features = self._encode(obs)
        for name, layer in self.memories.items():
            features[name] = layer(features[name], memory[name], segments)
        return self._heads(features, obs)

    def step(self, obs: Tree, memory: Any) -> tuple[Tensor, Tensor, Tree]:
        """Return outputs and values for one step of N episodes, and the recurrent state after it."""
        features, next_memory = self._encode(obs), {}
        for name, layer in self.memories.items():
            features[name], next_memory[name] = layer.step(features[name], memory[name])  # type: ignore[operator]
        return *self._heads(features, obs), next_memory

    def act(self, obs: Tree, memory: Any) -> tuple[Tensor, Tree]:
        """Return only the outputs for one step of N episodes, and the policy's recurrent state after it."""
        features, next_memory = self.encoder(split_mask(policy_obs(obs))[0]), {}
        if self.memories:
            step = self.memories["policy"].step
            features, next_memory["policy"] = step(features, memory["policy"])  # type: ignore[operator]
        return self._outputs(features, obs), next_memory

    def value(self, obs: Tree, memory: Any = None) -> Tensor:
        """Return only the values for one step of N episodes, [N]."""
        name, encoder = ("policy", self.encoder) if self.critic_encoder is None else ("value", self.critic_encoder)
        features = encoder(split_mask(obs)[0])
        if self.memories:
            features, _ = self.memories[name].step(features, memory[name])  # type: ignore[operator]
        return self._value(features)

    def prefers_fp32(self, rows: int) -> bool:
        """Return whether a CPU is faster in fp32 than in half precision, which casts all weights, for `rows` rows."""
        convolves = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in self.modules())
        products = rows * sum(weight.numel() for weight in self.parameters())
        return self.value_head.weight.device.type == "cpu" and not convolves and products < BF16_MIN_MACS

    def initial_state(self, count: int) -> Tree:
        """Return the initial recurrent state of `count` episodes; an empty dict if the network is not recurrent."""
        return {name: memory.initial(count) for name, memory in self.memories.items()}  # type: ignore[operator]

    def _encode(self, obs: Tree) -> dict[str, Tensor]:
        """Return the features for policy and value; only `policy` if they share an encoder."""
        features = {"policy": self.encoder(split_mask(policy_obs(obs))[0])}
        if self.critic_encoder is not None:
            features["value"] = self.critic_encoder(split_mask(obs)[0])
        return features

    def _heads(self, features: dict[str, Tensor], obs: Tree) -> tuple[Tensor, Tensor]:
        return self._outputs(features["policy"], obs), self._value(features.get("value", features["policy"]))

    def _outputs(self, features: Tensor, obs: Tree) -> Tensor:
        outputs: Tensor = self.policy_head(features).float()
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand(outputs.shape[0], -1)], dim=-1)
        return mask_logits(outputs, split_mask(obs)[1])

    def _value(self, features: Tensor) -> Tensor:
        return self.value_head(features).squeeze(-1).float()
