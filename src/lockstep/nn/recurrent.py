"""Memory: an LSTM or a GRU between an encoder and its heads.

Acting takes one step at a time. Learning takes whole sequences: they are cut where an episode began inside them, so
that nothing crosses its border, and laid side by side, padded at their ends, so that the fused kernel runs over all.

Shapes: N samples or environments, D features, H units; R sequences of S steps, one after another as N = R x S samples;
G pieces that the sequences are cut into, P steps of the longest.
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
    """What the network remembers of an episode."""

    kind: Literal["none", "lstm", "gru"] = "none"
    """none sees only the present."""
    hidden_size: int = 64
    """Units of the memory; policy and value have one each where they have an encoder each."""
    init_timescale: int = 1
    """Steps over which an untrained memory fades to about a third. What is needed later than a few steps is learned
    only if its gradient gets there, so give about the steps that must be bridged; 1 is what torch begins with."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ConfigError(
                f"algo.recurrent.hidden_size is {self.hidden_size}.", "Use 1 or more, or --algo.recurrent.kind none."
            )
        if self.init_timescale < 1:
            raise ConfigError(
                f"algo.recurrent.init_timescale is {self.init_timescale}.",
                "Use the steps that memory must bridge, or 1.",
            )


class Recurrent(nn.Module):
    """One recurrent layer: state in, state out."""

    def __init__(self, config: RecurrentConfig, features: int) -> None:
        super().__init__()
        self.layer: nn.LSTM | nn.GRU = (nn.LSTM if config.kind == "lstm" else nn.GRU)(features, config.hidden_size)
        self.names = ("hidden", "cell") if config.kind == "lstm" else ("hidden",)
        for name, weight in self.layer.named_parameters():
            (nn.init.orthogonal_ if name.startswith("weight") else nn.init.zeros_)(weight)
        # The gate that keeps what was is the second of both kinds; it begins at span / (span + 1).
        gate = slice(config.hidden_size, 2 * config.hidden_size)
        dict(self.layer.named_parameters())["bias_ih_l0"].data[gate] = math.log(config.init_timescale)

    def initial(self, count: int) -> MemoryState:
        """The state at the start of `count` episodes."""
        weight = self.layer.all_weights[0][0]
        return {name: weight.new_zeros(count, self.layer.hidden_size) for name in self.names}

    def step(self, features: Tensor, state: MemoryState) -> tuple[Tensor, MemoryState]:
        """One step: what the heads see [N, H], and the state after it."""
        weights = self.layer.all_weights[0]
        # Always in fp32: what is rounded here is carried on for the rest of the episode.
        with torch.autocast(features.device.type, enabled=False):
            if "cell" in state:
                hidden, cell = torch.lstm_cell(features.float(), [state["hidden"], state["cell"]], *weights)
                return hidden, {"hidden": hidden, "cell": cell}
            hidden = torch.gru_cell(features.float(), state["hidden"], *weights)
            return hidden, {"hidden": hidden}

    def forward(
        self, features: Tensor, state: MemoryState, starts: Tensor, pieces: "PaddedSegments | None" = None
    ) -> Tensor:
        """Sequences: what the heads see [N, H], from features [N, D], the state before each sequence [R, H], and where
        in them an episode started, [R, S]. `pieces` is what `cut` makes of the starts, where the caller has it."""
        pieces = split_at_resets(starts) if pieces is None else pieces
        # Where a piece goes on with what was before its sequence, it has that state, and elsewhere a fresh one.
        begun = tuple(
            torch.where(pieces.goes_on.unsqueeze(1), state[name][pieces.sequence], 0.0).unsqueeze(0)
            for name in self.names
        )  # [1, G, H]
        with torch.autocast(features.device.type, enabled=False):
            outputs, _ = self.layer(pad_segments(features.float(), pieces), begun if len(begun) > 1 else begun[0])
        return outputs.flatten(0, 1).index_select(0, pieces.rows)


class PaddedSegments(NamedTuple):
    """How sequences are cut into pieces of one episode each."""

    total: int
    """G."""
    longest: int
    """P."""
    rows: Tensor
    """[N] Where each sample is laid: its step within its piece, times G, plus its piece."""
    sequence: Tensor
    """[G] The sequence that each piece is of."""
    goes_on: Tensor
    """[G] Whether a piece goes on with an episode that was under way before its sequence."""


def split_at_resets(starts: Tensor) -> PaddedSegments:
    """Cut sequences [R, S] where an episode starts. How many pieces that makes depends on the data: waits for a GPU."""
    begins = starts.clone()
    begins[:, 0] = True
    first = begins.flatten().nonzero().squeeze(1)  # [G] sample with which each piece begins
    piece = begins.flatten().cumsum(0) - 1  # [N]
    step = torch.arange(starts.numel(), device=starts.device) - first[piece]  # [N]
    count, longest = len(first), int(step.max()) + 1
    goes_on = (first % starts.shape[1] == 0) & ~starts.flatten()[first]
    return PaddedSegments(count, longest, step * count + piece, first // starts.shape[1], goes_on)


class PieceCutter:
    """Cuts sequences on the host and uploads how, so that nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._upload = Uploader(device)

    def __call__(self, starts: Tensor) -> PaddedSegments:
        """The same as `cut` for starts [R, S] on the host, with tensors on the device."""
        pieces = split_at_resets(starts)
        room = starts.numel()  # there are at most as many pieces as samples
        padded = {"rows": pieces.rows, "sequence": torch.zeros(room, dtype=torch.int64)}
        padded["goes_on"] = torch.zeros(room, dtype=torch.bool)
        padded["sequence"][: pieces.total], padded["goes_on"][: pieces.total] = pieces.sequence, pieces.goes_on
        shown = self._upload(padded)
        sequence, goes_on = shown["sequence"][: pieces.total], shown["goes_on"][: pieces.total]
        return PaddedSegments(pieces.total, pieces.longest, shown["rows"], sequence, goes_on)


def pad_segments(samples: Tensor, pieces: PaddedSegments) -> Tensor:
    """Samples [N, D] side by side by piece, [P, G, D]. What pads them is zero: made here, it is nobody's number."""
    padded = samples.new_zeros(pieces.longest * pieces.total, samples.shape[1])
    return padded.index_copy(0, pieces.rows, samples).view(pieces.longest, pieces.total, -1)
