"""Replay sampling on a device with tensor operations, bit-identical to the compiled kernels of `replay_buffer.py`.

No value is read on the host and no shape depends on data, so nothing synchronizes with the device.

Shapes: L local lanes, M samples per lane, H steps, A agents.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RingBuffer(NamedTuple):
    """Layout of a ring: it holds rows `first` up to `stop`, and row number i is at index i modulo `rows`."""

    first: int
    stop: int
    rows: int
    envs: int


def places_of(starts: Tensor, ring: RingBuffer, ahead: int = 0) -> Tensor:
    """Return the indices of the steps `ahead` after some starts [L, ...] in the flattened rings of all lanes.

    A start is an index into the current steps of a lane, oldest row first, environment by environment.
    """
    number, env = ring.first + ahead + starts // ring.envs, starts % ring.envs
    lane = torch.arange(len(starts), device=starts.device).view(-1, *(1,) * (starts.dim() - 1))
    return (lane * ring.rows + number % ring.rows) * ring.envs + env


class Targets(NamedTuple):
    """Components of n-step targets."""

    reward: Tensor
    """[L x M, A] discounted sums of rewards."""
    first: Tensor
    """[L x M] index of the first step of each sample."""
    last: Tensor
    """[L x M] index of the last step of its sum."""
    discount: Tensor
    """[L x M] discount of the bootstrap value: 0 after a termination."""


def n_step_targets(
    starts: Tensor,
    ring: RingBuffer,
    steps: int,
    discount: float,
    terminated: Tensor,
    truncated: Tensor,
    rewards: Tensor,
) -> Targets:
    """Compute n-step targets from each start [L, M] over up to `steps` steps, ending at episode end or newest row.

    `terminated` and `truncated` are flat [L x rows x envs], `rewards` are [L x rows x envs, A].
    """
    first = last = places_of(starts, ring).flatten()
    left = (ring.stop - ring.first - starts // ring.envs).flatten()  # steps up to the newest row
    going = torch.ones_like(first, dtype=torch.bool)
    weight = torch.ones_like(first, dtype=torch.float64)
    total = torch.zeros(len(first), rewards.shape[1], device=rewards.device)
    for ahead in range(steps):
        here = places_of(starts, ring, ahead).flatten()
        going = going & (left > ahead)
        last = torch.where(going, here, last)
        # In float64 and rounded after each step like the compiled kernel, without fused multiply-adds.
        gain = torch.where(going, weight, 0.0).unsqueeze(1) * rewards.index_select(0, here).double()
        total = (total.double() + gain).float()
        ended, over = truncated.index_select(0, here), terminated.index_select(0, here)
        weight = torch.where(going, weight * discount * ~over, weight)
        going = going & ~(ended | over)
    return Targets(total, first, last, weight.float())


def stretches(
    tries: Tensor, ring: RingBuffer, steps: int, terminated: Tensor, truncated: Tensor
) -> tuple[Tensor, Tensor]:
    """Return indices [L x M, H] of H consecutive steps of one episode, from the first valid one of each sample's tries.

    Tries are starts [L, M, tries]. If none is valid, take the next valid start after the last one. Also return a mask
    [L x M], False if a lane has no valid start.
    """
    lanes, count = tries.shape[:2]
    starts = (ring.stop - ring.first - steps + 1) * ring.envs
    every = torch.arange(starts, device=tries.device).expand(lanes, -1)
    ends = terminated | truncated
    fits = torch.ones(lanes, starts, dtype=torch.bool, device=tries.device)
    for ahead in range(steps - 1):  # the last step may end its episode
        fits = fits & ~ends[places_of(every, ring, ahead)]
    # The next valid start at or after each start, wrapping around to the first.
    following = torch.where(fits, every, starts).flip(1).cummin(1).values.flip(1)
    following = torch.where(following < starts, following, following[:, :1])
    whole = following[:, :1] < starts  # [L, 1]

    flat = tries.flatten(1)
    good = fits.gather(1, flat).view_as(tries)
    chosen = tries.gather(2, good.int().argmax(2, keepdim=True)).squeeze(2)  # [L, M], the first valid try
    after = following.gather(1, (tries[:, :, -1] + 1) % starts)
    start = torch.where(good.any(2), chosen, torch.where(whole, after, tries[:, :, 0]))
    places = torch.stack([places_of(start, ring, ahead) for ahead in range(steps)], dim=-1)
    return places.view(-1, steps), whole.expand(lanes, count).reshape(-1)
