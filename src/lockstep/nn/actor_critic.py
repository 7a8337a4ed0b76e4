"""A policy and a value function in one module, on one encoder (and memory) or on one each.

Shapes: N samples, O outputs of the policy. With memory, samples are sequences one after another: see `nn/recurrent.py`.
"""

from typing import Any

import torch
from gymnasium import Space
from torch import Tensor, nn

from lockstep.nn.distributions import ActionDistribution
from lockstep.nn.encoders import CNN, EncoderConfig
from lockstep.nn.initialization import orthogonal_init
from lockstep.nn.recurrent import PaddedSegments, Recurrent, RecurrentConfig
from lockstep.pytree import Tree

BF16_MIN_MACS = 30_000_000
"""Of a dense network: fewer take longer in bf16 than in fp32, at widths of 128, 512 and 1,024 alike."""


class ActorCritic(nn.Module):
    """Pictures share one encoder between policy and value; vectors are cheap, and learn better with one each."""

    def __init__(
        self,
        observations: Space,
        actions: ActionDistribution,
        config: EncoderConfig,
        memory: RecurrentConfig | None = None,
    ) -> None:
        super().__init__()
        self.encoder = config.build(observations)
        pictures = any(isinstance(module, CNN) for module in self.encoder.modules())
        shared = pictures if config.share_encoder is None else config.share_encoder
        self.critic_encoder = None if shared else config.build(observations)
        features = int(self.encoder.features)  # type: ignore[arg-type]
        self.memories = nn.ModuleDict()
        if memory is not None and memory.kind != "none":
            names = ("policy",) if shared else ("policy", "value")
            self.memories.update({name: Recurrent(memory, features) for name in names})
            features = memory.hidden_size
        self.policy_head = orthogonal_init(nn.Linear(features, actions.num_params), 0.01)
        self.value_head = orthogonal_init(nn.Linear(features, 1), 1.0)
        self.log_std = nn.Parameter(torch.zeros(actions.num_free_params)) if actions.num_free_params else None

    def forward(
        self, obs: Tree, memory: Any = None, starts: Tensor | None = None, pieces: PaddedSegments | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs for the action distribution [N, O] and values [N], both fp32 whatever the encoder ran in.

        A net with memory needs its state before each sequence, and where in the sequences an episode started; `pieces`
        is what `cut` makes of the latter, where the caller has it.
        """
        seen = self._encode(obs)
        for name, remember in self.memories.items():
            seen[name] = remember(seen[name], memory[name], starts, pieces)
        return self._outputs(seen["policy"]), self._value(seen.get("value", seen["policy"]))

    def step(self, obs: Tree, memory: Any) -> tuple[Tensor, Tensor, Tree]:
        """Outputs and values for one step of N episodes, and their memory after it."""
        seen, after = self._encode(obs), {}
        for name, remember in self.memories.items():
            seen[name], after[name] = remember.step(seen[name], memory[name])  # type: ignore[operator]
        return self._outputs(seen["policy"]), self._value(seen.get("value", seen["policy"])), after

    def value(self, obs: Tree, memory: Any = None) -> Tensor:
        """Values alone of one step of N episodes, [N]."""
        name, encoder = ("policy", self.encoder) if self.critic_encoder is None else ("value", self.critic_encoder)
        seen = encoder(obs)
        if self.memories:
            seen, _ = self.memories[name].step(seen, memory[name])  # type: ignore[operator]
        return self._value(seen)

    def prefers_fp32(self, rows: int) -> bool:
        """Whether a CPU acts on so many rows faster in fp32 than in half precision, for which it casts all weights."""
        convolves = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in self.modules())
        weights = list(self.parameters())
        products = rows * sum(weight.numel() for weight in weights)
        return weights[0].device.type == "cpu" and not convolves and products < BF16_MIN_MACS

    def initial_state(self, count: int) -> Tree:
        """The memory of `count` episodes about to start; an empty dict where there is none."""
        return {name: memory.initial(count) for name, memory in self.memories.items()}  # type: ignore[operator]

    def _encode(self, obs: Tree) -> dict[str, Tensor]:
        """What policy and value see of observations; policy alone where they share it."""
        seen = {"policy": self.encoder(obs)}
        return seen if self.critic_encoder is None else seen | {"value": self.critic_encoder(obs)}

    def _outputs(self, features: Tensor) -> Tensor:
        outputs = self.policy_head(features).float()
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], dim=-1)
        return outputs

    def _value(self, features: Tensor) -> Tensor:
        return self.value_head(features).squeeze(-1).float()
