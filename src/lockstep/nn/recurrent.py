"""Recurrent layer: an LSTM or GRU between an encoder and its heads.

Acting runs one step at a time. Training runs whole sequences. They are split where an episode starts, so that no state
crosses an episode boundary, and padded to equal length, so that one fused kernel processes all of them.

Shapes: N samples or environments, D features, H units; R sequences of S steps, one after another as N = R x S samples;
G segments that the sequences are split into, P steps of the longest segment.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.config import ConfigError
from lockstep.transfer import Uploader

MemoryState = dict[str, Tensor]
"""[N, H] each: `hidden`, and for an LSTM `cell`."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Recurrent layer of the network."""

    kind: Literal["none", "lstm", "gru"] = "none"
    """Type of recurrent layer. none: the network sees only the current observation."""
    hidden_size: int = 64
    """Units of the recurrent state. Policy and value have separate layers if they have separate encoders."""
    init_timescale: int = 1
    """Steps after which the state of an untrained layer decays to about a third. Set it to the number of steps that the
    network must remember, so that gradients reach that far. 1: torch's initialization."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ConfigError(
                f"algo.recurrent.hidden_size is {self.hidden_size}.", "Use 1 or more, or --algo.recurrent.kind none."
            )
        if self.init_timescale < 1:
            raise ConfigError(
                f"algo.recurrent.init_timescale is {self.init_timescale}.",
                "Use the number of steps that the network must remember, or 1.",
            )


class Recurrent(nn.Module):
    """One LSTM or GRU layer with explicit state."""

    def __init__(self, config: RecurrentConfig, features: int) -> None:
        super().__init__()
        self.layer: nn.LSTM | nn.GRU = (nn.LSTM if config.kind == "lstm" else nn.GRU)(features, config.hidden_size)
        self.names = ("hidden", "cell") if config.kind == "lstm" else ("hidden",)
        for name, weight in self.layer.named_parameters():
            (nn.init.orthogonal_ if name.startswith("weight") else nn.init.zeros_)(weight)
        # The second gate (LSTM: forget, GRU: update) keeps the old state. It starts at t / (t + 1), t = init_timescale.
        gate = slice(config.hidden_size, 2 * config.hidden_size)
        dict(self.layer.named_parameters())["bias_ih_l0"].data[gate] = math.log(config.init_timescale)

    def initial(self, count: int) -> MemoryState:
        """Return the state at the start of `count` episodes."""
        weight = self.layer.all_weights[0][0]
        return {name: weight.new_zeros(count, self.layer.hidden_size) for name in self.names}

    def step(self, features: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """Run one step; return features for the heads [N, H] and the new state."""
        weights = self.layer.all_weights[0]
        # Always in fp32: rounding errors of the state would accumulate for the rest of the episode.
        with torch.autocast(features.device.type, enabled=False):
            if "cell" in state:
                hidden, cell = torch.lstm_cell(features.float(), [state["hidden"], state["cell"]], *weights)
                return hidden, {"hidden": hidden, "cell": cell}
            hidden = torch.gru_cell(features.float(), state["hidden"], *weights)
            return hidden, {"hidden": hidden}

    def forward(self, features: Tensor, state: MemoryState, segments: "PaddedSegments") -> Tensor:
        """Run whole sequences: features [N, D] to features for the heads [N, H].

        `state` [R, H] is the state before each sequence, `segments` their split at the first steps of episodes.
        """
        # A segment that continues an episode from before its sequence starts from that state, the others from zero.
        hx = tuple(
            torch.where(segments.continues.unsqueeze(1), state[name][segments.sequence], 0.0).unsqueeze(0)
            for name in self.names
        )  # [1, G, H]
        with torch.autocast(features.device.type, enabled=False):
            outputs, _ = self.layer(pad_segments(features.float(), segments), hx if len(hx) > 1 else hx[0])
        return outputs.flatten(0, 1).index_select(0, segments.rows)


class PaddedSegments(NamedTuple):
    """Split of sequences into segments of one episode each, and their layout after padding."""

    total: int
    """G."""
    longest: int
    """P."""
    rows: Tensor
    """[N] Row of each sample in the padded layout: its step within its segment, times G, plus its segment."""
    sequence: Tensor
    """[G] The sequence that contains each segment."""
    continues: Tensor
    """[G] Whether a segment continues an episode that started before its sequence."""

    def on_device(self, upload: Uploader) -> "PaddedSegments":
        """Copy the tensors to the device of `upload`. They are valid until its next call."""
        return self._replace(**upload({"rows": self.rows, "sequence": self.sequence, "continues": self.continues}))


def split_at_resets(starts: Tensor) -> PaddedSegments:
    """Split sequences at episode starts [R, S]. Synchronizes on a GPU: their number depends on data."""
    is_start = starts.clone()
    is_start[:, 0] = True
    first = is_start.flatten().nonzero().squeeze(1)  # [G] first sample of each segment
    segment = is_start.flatten().cumsum(0) - 1  # [N]
    step = torch.arange(starts.numel(), device=starts.device) - first[segment]  # [N]
    count, longest = len(first), int(step.max()) + 1
    continues = (first % starts.shape[1] == 0) & ~starts.flatten()[first]
    return PaddedSegments(count, longest, step * count + segment, first // starts.shape[1], continues)


def pad_segments(samples: Tensor, segments: PaddedSegments) -> Tensor:
    """Arrange samples [N, D] by segment and pad with zeros to [P, G, D]."""
    padded = samples.new_zeros(segments.longest * segments.total, samples.shape[1])
    return padded.index_copy(0, segments.rows, samples).view(segments.longest, segments.total, -1)
