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


def ring_indices(starts: Tensor, ring: RingBuffer, offset: int | Tensor) -> Tensor:
    """Return the indices of the steps `offset` after some starts [L, ...] in the flattened rings of all lanes.

    A start is an index into the current steps of a lane, oldest row first, environment by environment.
    """
    row, env = ring.first + offset + starts // ring.envs, starts % ring.envs
    lane = torch.arange(len(starts), device=starts.device).view(-1, *(1,) * (starts.dim() - 1))
    return (lane * ring.rows + row % ring.rows) * ring.envs + env


def _consecutive(starts: Tensor, ring: RingBuffer, steps: int) -> Tensor:
    """Return the indices [L x M, H] of the H steps from each start [L, M] on."""
    return ring_indices(starts.unsqueeze(-1), ring, torch.arange(steps, device=starts.device)).view(-1, steps)


def n_step_targets(
    starts: Tensor, ring: RingBuffer, steps: int, discount: float, buffers: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute n-step targets from each start [L, M] over up to `steps` steps, ending at episode end or newest row.

    `buffers` are the rings of all lanes by name, [L, rows, envs, ...]. Return the discounted sums of rewards [L x M],
    or [L x M, A] for a team, then the indices of the first and the last step of each sum [L x M], and the discounts of
    the bootstrap values [L x M]. A discount is 0 after a termination.
    """
    terminated, truncated = buffers["terminated"].flatten(), buffers["truncated"].flatten()
    agents = buffers["reward"].shape[3:]
    rewards = buffers["reward"].reshape(len(terminated), agents.numel())  # [L x rows x envs, A]
    if starts.device.type == "cpu":
        data = (x.numpy() for x in (terminated, truncated, rewards))
        found = _n_step_targets_cpu(starts.numpy(), ring, steps, discount, *data)
        total, first, last, weight = map(torch.from_numpy, found)
        return total.view(-1, *agents), first, last, weight
    indices = _consecutive(starts, ring, steps)
    first = last = indices[:, 0]
    remaining = (ring.stop - ring.first - starts // ring.envs).flatten()  # steps up to the newest row
    active = torch.ones_like(first, dtype=torch.bool)
    weight = torch.ones_like(first, dtype=torch.float64)
    total = torch.zeros(len(first), rewards.shape[1], device=rewards.device)
    for offset in range(steps):
        index = indices[:, offset]
        active = active & (remaining > offset)
        last = torch.where(active, index, last)
        # In float64 and rounded after each step like the compiled kernel, without fused multiply-adds.
        weighted = torch.where(active, weight, 0.0).unsqueeze(1) * rewards.index_select(0, index).double()
        total = (total.double() + weighted).float()
        is_truncated, is_terminated = truncated.index_select(0, index), terminated.index_select(0, index)
        weight = torch.where(active, weight * discount * ~is_terminated, weight)
        active = active & ~(is_truncated | is_terminated)
    return total.view(-1, *agents), first, last, weight.float()


def valid_sequences(tries: Tensor, ring: RingBuffer, steps: int, buffers: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return indices [L x M, H] of H consecutive steps of one episode, from the first valid one of each sample's tries.

    Tries are starts [L, M, tries]. If none is valid, take the next valid start after the last one. Also return a mask
    [L x M], False if a lane has no valid start.
    """
    terminated, truncated = buffers["terminated"].flatten(), buffers["truncated"].flatten()
    if tries.device.type == "cpu":
        found = _valid_sequences_cpu(tries.numpy(), ring, steps, terminated.numpy(), truncated.numpy())
        indices, whole = map(torch.from_numpy, found)
        return indices.view(-1, steps), whole.view(-1)
    lanes, count = tries.shape[:2]
    ends = terminated | truncated
    num_starts = int(ring.stop - ring.first - steps + 1) * ring.envs
    all_starts = torch.arange(num_starts, device=tries.device).expand(lanes, -1)
    valid = torch.ones(lanes, num_starts, dtype=torch.bool, device=tries.device)
    for offset in range(steps - 1):  # the last step may end its episode
        valid = valid & ~ends[ring_indices(all_starts, ring, offset)]
    # The next valid start at or after each start, wrapping around to the first.
    next_valid = torch.where(valid, all_starts, num_starts).flip(1).cummin(1).values.flip(1)
    next_valid = torch.where(next_valid < num_starts, next_valid, next_valid[:, :1])
    whole = next_valid[:, :1] < num_starts  # [L, 1]

    valid_tries = valid.gather(1, tries.flatten(1)).view_as(tries)
    chosen = tries.gather(2, valid_tries.int().argmax(2, keepdim=True)).squeeze(2)  # [L, M], the first valid try
    fallback = next_valid.gather(1, (tries[:, :, -1] + 1) % num_starts)
    start = torch.where(valid_tries.any(2), chosen, torch.where(whole, fallback, tries[:, :, 0]))
    return _consecutive(start, ring, steps), whole.expand(lanes, count).reshape(-1)


@njit(cache=True, nogil=True)
def _n_step_targets_cpu(
    draws: Any, ring: RingBuffer, steps: int, discount: float, terminated: Any, truncated: Any, rewards: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the results of `n_step_targets` for each start [L, M]."""
    total, weights = np.zeros((draws.size, rewards.shape[1]), np.float32), np.empty(draws.size, np.float32)
    firsts, lasts = np.empty(draws.size, np.int64), np.empty(draws.size, np.int64)
    sample = 0
    for lane in range(draws.shape[0]):
        for draw in draws[lane]:
            row, env = ring.first + draw // ring.envs, draw % ring.envs
            weight = 1.0
            for offset in range(min(steps, ring.stop - row)):  # not beyond the newest row
                index = (lane * ring.rows + (row + offset) % ring.rows) * ring.envs + env
                if offset == 0:
                    firsts[sample] = index
                lasts[sample] = index
                for agent in range(rewards.shape[1]):
                    total[sample, agent] += weight * rewards[index, agent]
                weight *= discount
                if terminated[index]:
                    weight = 0.0
                if terminated[index] or truncated[index]:
                    break
            weights[sample] = weight
            sample += 1
    return total, firsts, lasts, weights


@njit(cache=True, nogil=True)
def _valid_sequences_cpu(draws: Any, ring: RingBuffer, steps: int, terminated: Any, truncated: Any) -> tuple[Any, Any]:
    """Return the results of `valid_sequences` [L, M, ...] for tries [L, M, tries].

    If no try of a sample is valid, search for the next valid start.
    """
    indices, whole = np.empty((*draws.shape[:2], steps), np.int64), np.ones(draws.shape[:2], np.bool_)
    num_starts = (ring.stop - ring.first - steps + 1) * ring.envs
    for lane in range(draws.shape[0]):
        for sample in range(draws.shape[1]):
            start, attempt = draws[lane, sample, 0], 0
            while True:
                row, env = ring.first + start // ring.envs, start % ring.envs
                valid = True
                for offset in range(steps):
                    index = (lane * ring.rows + (row + offset) % ring.rows) * ring.envs + env
                    indices[lane, sample, offset] = index
                    if offset < steps - 1 and (terminated[index] or truncated[index]):
                        valid = False
                if valid:
                    break
                attempt += 1
                if attempt < draws.shape[2]:
                    start = draws[lane, sample, attempt]
                elif attempt < draws.shape[2] + num_starts:
                    start = (start + 1) % num_starts
                else:
                    whole[lane, sample:] = False
                    indices[lane, sample:] = indices[lane, sample]
                    break
            if not whole[lane, sample]:
                break
    return indices, whole
