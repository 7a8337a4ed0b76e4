"""Selection of replay samples: compiled kernels on the CPU, tensor operations with the same bits on other devices.

On a device, no value is read on the host and no shape depends on data, so nothing synchronizes with the device.

Shapes: L local lanes, M samples per lane, H steps, A agents.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor


class RingBuffer(NamedTuple):
    """Layout of a ring: it holds rows `first` up to `stop`, and row number i is at index i modulo `rows`."""

    first: int | Tensor
    stop: int | Tensor
    rows: int
    envs: int


def places_of(starts: Tensor, ring: RingBuffer, ahead: int | Tensor) -> Tensor:
    """Return the indices of the steps `ahead` after some starts [L, ...] in the flattened rings of all lanes.

    A start is an index into the current steps of a lane, oldest row first, environment by environment.
    """
    number, env = ring.first + ahead + starts // ring.envs, starts % ring.envs
    lane = torch.arange(len(starts), device=starts.device).view(-1, *(1,) * (starts.dim() - 1))
    return (lane * ring.rows + number % ring.rows) * ring.envs + env


def _consecutive(starts: Tensor, ring: RingBuffer, steps: int) -> Tensor:
    """Return the indices [L x M, H] of the H steps from each start [L, M] on."""
    return places_of(starts.unsqueeze(-1), ring, torch.arange(steps, device=starts.device)).view(-1, steps)


class Targets(NamedTuple):
    """Components of n-step targets."""

    reward: Tensor
    """[L x M], or [L x M, A] for a team: discounted sums of rewards."""
    first: Tensor
    """[L x M] index of the first step of each sample."""
    last: Tensor
    """[L x M] index of the last step of its sum."""
    discount: Tensor
    """[L x M] discount of the bootstrap value: 0 after a termination."""


def n_step_targets(starts: Tensor, ring: RingBuffer, steps: int, discount: float, buffers: dict[str, Any]) -> Targets:
    """Compute n-step targets from each start [L, M] over up to `steps` steps, ending at episode end or newest row.

    `buffers` are the rings of all lanes by name, [L, rows, envs, ...].
    """
    terminated, truncated = buffers["terminated"].flatten(), buffers["truncated"].flatten()
    agents = buffers["reward"].shape[3:]
    rewards = buffers["reward"].reshape(len(terminated), agents.numel())  # [L x rows x envs, A]
    if starts.device.type == "cpu":
        data = (x.numpy() for x in (terminated, truncated, rewards))
        total, first, last, weight = map(torch.from_numpy, _accumulate(starts.numpy(), ring, steps, discount, *data))
        return Targets(total.view(-1, *agents), first, last, weight)
    places = _consecutive(starts, ring, steps)
    first = last = places[:, 0]
    left = (ring.stop - ring.first - starts // ring.envs).flatten()  # steps up to the newest row
    going = torch.ones_like(first, dtype=torch.bool)
    weight = torch.ones_like(first, dtype=torch.float64)
    total = torch.zeros(len(first), rewards.shape[1], device=rewards.device)
    for ahead in range(steps):
        here = places[:, ahead]
        going = going & (left > ahead)
        last = torch.where(going, here, last)
        # In float64 and rounded after each step like the compiled kernel, without fused multiply-adds.
        gain = torch.where(going, weight, 0.0).unsqueeze(1) * rewards.index_select(0, here).double()
        total = (total.double() + gain).float()
        ended, over = truncated.index_select(0, here), terminated.index_select(0, here)
        weight = torch.where(going, weight * discount * ~over, weight)
        going = going & ~(ended | over)
    return Targets(total.view(-1, *agents), first, last, weight.float())


def stretches(tries: Tensor, ring: RingBuffer, steps: int, buffers: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return indices [L x M, H] of H consecutive steps of one episode, from the first valid one of each sample's tries.

    Tries are starts [L, M, tries]. If none is valid, take the next valid start after the last one. Also return a mask
    [L x M], False if a lane has no valid start.
    """
    terminated, truncated = buffers["terminated"].flatten(), buffers["truncated"].flatten()
    if tries.device.type == "cpu":
        found = _follow(tries.numpy(), ring, steps, terminated.numpy(), truncated.numpy())
        places, whole = map(torch.from_numpy, found)
        return places.view(-1, steps), whole.view(-1)
    lanes, count = tries.shape[:2]
    ends = terminated | truncated
    starts = int(ring.stop - ring.first - steps + 1) * ring.envs
    every = torch.arange(starts, device=tries.device).expand(lanes, -1)
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
    return _consecutive(start, ring, steps), whole.expand(lanes, count).reshape(-1)


@njit(cache=True, nogil=True)
def _accumulate(
    draws: Any, ring: RingBuffer, steps: int, discount: float, terminated: Any, truncated: Any, rewards: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the fields of `Targets` for each start [L, M]."""
    total, weights = np.zeros((draws.size, rewards.shape[1]), np.float32), np.empty(draws.size, np.float32)
    picks, lasts = np.empty(draws.size, np.int64), np.empty(draws.size, np.int64)
    sample = 0
    for lane in range(draws.shape[0]):
        for draw in draws[lane]:
            number, env = ring.first + draw // ring.envs, draw % ring.envs
            weight = 1.0
            for ahead in range(min(steps, ring.stop - number)):  # not beyond the newest row
                place = (lane * ring.rows + (number + ahead) % ring.rows) * ring.envs + env
                if ahead == 0:
                    picks[sample] = place
                lasts[sample] = place
                for agent in range(rewards.shape[1]):
                    total[sample, agent] += weight * rewards[place, agent]
                weight *= discount
                if terminated[place]:
                    weight = 0.0
                if terminated[place] or truncated[place]:
                    break
            weights[sample] = weight
            sample += 1
    return total, picks, lasts, weights


@njit(cache=True, nogil=True)
def _follow(draws: Any, ring: RingBuffer, steps: int, terminated: Any, truncated: Any) -> tuple[Any, Any]:
    """Return the results of `stretches` [L, M, ...] for tries [L, M, tries].

    If no try of a sample is valid, search for the next valid start.
    """
    places, whole = np.empty((*draws.shape[:2], steps), np.int64), np.ones(draws.shape[:2], np.bool_)
    starts = (ring.stop - ring.first - steps + 1) * ring.envs
    for lane in range(draws.shape[0]):
        for sample in range(draws.shape[1]):
            start, attempt = draws[lane, sample, 0], 0
            while True:
                number, env = ring.first + start // ring.envs, start % ring.envs
                fits = True
                for ahead in range(steps):
                    place = (lane * ring.rows + (number + ahead) % ring.rows) * ring.envs + env
                    places[lane, sample, ahead] = place
                    if ahead < steps - 1 and (terminated[place] or truncated[place]):
                        fits = False
                if fits:
                    break
                attempt += 1
                if attempt < draws.shape[2]:
                    start = draws[lane, sample, attempt]
                elif attempt < draws.shape[2] + starts:
                    start = (start + 1) % starts
                else:
                    whole[lane, sample:] = False
                    places[lane, sample:] = places[lane, sample]
                    break
            if not whole[lane, sample]:
                break
    return places, whole
