"""Draws from replay on a device, as tensor operations: what the compiled kernels of `replay.py` do, bit for bit.

No value is read on the host and no shape depends on data, so nothing waits for the device.

Shapes: L local lanes, M samples a lane, H steps, A agents.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RingBuffer(NamedTuple):
    """Where rows lie: numbers from `first` up to `stop`, each at its number modulo `rows`."""

    first: int
    stop: int
    rows: int
    envs: int


def places_of(starts: Tensor, ring: RingBuffer, ahead: int = 0) -> Tensor:
    """Where the steps that are `ahead` of some starts [L, ...] lie in the flattened rings of all lanes.

    A start counts the steps of a lane that are still there, oldest first, environment by environment.
    """
    number, env = ring.first + ahead + starts // ring.envs, starts % ring.envs
    lane = torch.arange(len(starts), device=starts.device).view(-1, *(1,) * (starts.dim() - 1))
    return (lane * ring.rows + number % ring.rows) * ring.envs + env


class Targets(NamedTuple):
    """What n-step targets are made of."""

    reward: Tensor
    """[L x M, A] discounted sums."""
    first: Tensor
    """[L x M] where each sample is."""
    last: Tensor
    """[L x M] where the last step of its sum is."""
    discount: Tensor
    """[L x M] what the value of what follows counts: 0 after a termination."""


def n_step_targets(
    starts: Tensor,
    ring: RingBuffer,
    steps: int,
    discount: float,
    terminated: Tensor,
    truncated: Tensor,
    rewards: Tensor,
) -> Targets:
    """Follow each start [L, M] for up to `steps` steps, which end with the episode or with the newest row.

    `terminated` and `truncated` are flat [places], `rewards` are [places, A].
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
        # In double and rounded after each step, as the compiled kernel does; without fused multiply-adds.
        gain = torch.where(going, weight, 0.0).unsqueeze(1) * rewards.index_select(0, here).double()
        total = (total.double() + gain).float()
        ended, over = truncated.index_select(0, here), terminated.index_select(0, here)
        weight = torch.where(going, weight * discount * ~over, weight)
        going = going & ~(ended | over)
    return Targets(total, first, last, weight.float())


def stretches(
    tries: Tensor, ring: RingBuffer, steps: int, terminated: Tensor, truncated: Tensor
) -> tuple[Tensor, Tensor]:
    """Places [L x M, H] of the first of each sample's tries [L, M, tries] whose episode goes on for long enough.

    Where none does, it is the next start after them that does. Also [L x M]: False where a lane has no such start.
    """
    lanes, count = tries.shape[:2]
    starts = (ring.stop - ring.first - steps + 1) * ring.envs
    every = torch.arange(starts, device=tries.device).expand(lanes, -1)
    ends = terminated | truncated
    fits = torch.ones(lanes, starts, dtype=torch.bool, device=tries.device)
    for ahead in range(steps - 1):  # the last step may end its episode
        fits = fits & ~ends[places_of(every, ring, ahead)]
    # The next start that fits, from each on; beyond the last one it goes on with the first.
    following = torch.where(fits, every, starts).flip(1).cummin(1).values.flip(1)
    following = torch.where(following < starts, following, following[:, :1])
    whole = following[:, :1] < starts  # [L, 1]

    flat = tries.flatten(1)
    good = fits.gather(1, flat).view_as(tries)
    chosen = tries.gather(2, good.int().argmax(2, keepdim=True)).squeeze(2)  # [L, M], the first that is good
    after = following.gather(1, (tries[:, :, -1] + 1) % starts)
    start = torch.where(good.any(2), chosen, torch.where(whole, after, tries[:, :, 0]))
    places = torch.stack([places_of(start, ring, ahead) for ahead in range(steps)], dim=-1)
    return places.view(-1, steps), whole.expand(lanes, count).reshape(-1)
