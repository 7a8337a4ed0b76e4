"""Replay: the transitions of the last steps, a ring for each lane, to draw from again and again.

Every environment adds one transition a step, so all lanes hold the same number and the count of the whole run needs no
agreement. What is drawn is a pure function of seed, lane and a counter. A transition holds the observation that really
followed it: `final_obs` where its episode ended.

Shapes: L local lanes, E environments a lane, B = L x E, T rows of a ring (one step of a lane each), M samples a lane.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.data.nonfinite import locate_nonfinite, value_range
from lockstep.data.replay_device import RingBuffer, n_step_targets, stretches
from lockstep.data.rollout import Rollout
from lockstep.distributed import DistributedOptimizer
from lockstep.lanes import Lanes
from lockstep.protocols import AppendOnlyTensor, LaneState, StateDict, Step
from lockstep.pytree import leaves, named_leaves, tree_map, tree_where
from lockstep.transfer import Uploader, download_bytes

_TRIES = 16
"""Stretches that are drawn for one sample, of which the first that lies in one episode is taken."""
OUTCOME = ("reward", "terminated", "truncated", "next_obs")
"""Parts of a transition that n-step targets are made of; all others are what was seen and done."""


def outcome(step: Step) -> dict[str, Any]:
    """The second half of a transition, [B, ...] each; rewards are the agents' own where there are several."""
    ended = step.terminated | step.truncated
    return {
        "reward": step.reward if step.agent_reward is None else step.agent_reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "next_obs": tree_where(ended, step.final_obs, step.obs),
    }


def add_rollout(
    replay: "Replay", rollout: Rollout, outcomes: Rollout, optimizer: DistributedOptimizer, clock: TrainState
) -> bool:
    """Write a rollout to replay, unless it has bad numbers on any process: those would stay for long. Whether it did.

    An optimizer that learns from it says how many such rollouts may be left out, or stops the run.
    """
    lanes, seen = optimizer.runtime.lanes, rollout.buffers | outcomes.buffers
    table = value_range(seen).expand(len(lanes), 1)
    if optimizer.runtime.exact_sum(table).isfinite().all():
        for t in range(rollout.horizon):
            replay.write(tree_map(lambda x, t=t: x[t], seen))
        return True
    given = {"observation": rollout["obs"], "reward": outcomes["reward"], "next observation": outcomes["next_obs"]}
    update = int(optimizer.updates) + 1
    optimizer.nonfinite_policy.handle(
        f"iteration {clock.iteration + 1}, before update {update}, has a rollout that is not finite:",
        locate_nonfinite(given, lanes.local) or locate_nonfinite({"action": rollout["action"]}, lanes.local),
        "Mend the environment, or use --run.on-nonfinite skip to leave such iterations out.",
        {"rollout": seen},
    )
    return False


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Where replay is kept."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: on the GPU of each process where its share takes at most half of the free memory there, else in host
    memory. Changes no bit of what is drawn."""


class Replay:
    """Preallocated rings of transitions, in host memory or on the device of the learner."""

    def __init__(
        self,
        capacity: int,
        lanes: Lanes,
        example: dict[str, Any],
        purpose: str = "replay",
        config: ReplayConfig | None = None,
        learner: torch.device | None = None,
    ) -> None:
        """`capacity` is of the whole run, rounded down to whole steps; `example` has the form of what is written.

        What is drawn is on the device of the `learner`, by default the CPU.
        """
        self._lanes, self._streams = lanes, lanes.streams(purpose)
        self._learner = learner or torch.device("cpu")
        self._upload = Uploader(self._learner)
        self.envs = len(example["reward"]) // len(lanes)
        self.rows = capacity // (lanes.num_lanes * self.envs)
        if self.rows < 1:
            raise ConfigError(
                f"replay for {capacity} transitions cannot hold one step of {lanes.num_lanes * self.envs} "
                "environments.",
                f"Use {lanes.num_lanes * self.envs} or more.",
            )
        shape = (len(lanes), self.rows, self.envs)
        row = sum(leaf[:1].nbytes for leaf in leaves(example))
        self.device = _choose_device((config or ReplayConfig()).device, self._learner, math.prod(shape) * row)
        # Lane-major, so that a lane's ring is one block whoever hosts it. Host memory is taken as it is written.
        self.buffers: dict[str, Any] = tree_map(
            lambda x: torch.empty(*shape, *x.shape[1:], dtype=x.dtype, device=self.device), example
        )
        self._written = np.zeros(len(lanes), np.int64)
        """[L] rows that were ever written: the same for all lanes, but each lane's own to save."""

    @property
    def count(self) -> int:
        """Transitions that there are to draw from, over all lanes of the run."""
        return min(self._stop, self.rows) * self.envs * self._lanes.num_lanes

    @property
    def _stop(self) -> int:
        return int(self._written[0])

    @property
    def _ring(self) -> RingBuffer:
        return RingBuffer(max(0, self._stop - self.rows), self._stop, self.rows, self.envs)

    def write(self, values: dict[str, Any]) -> None:
        """Add one step of every environment, [B, ...] each, in place of the oldest where the rings are full."""
        row = self._stop % self.rows
        slots = [ring[:, row] for ring in leaves(self.buffers)]
        given = [value.unflatten(0, (-1, self.envs)) for value in leaves(values)]
        if self.device.type == "cpu" and self._learner.type != "cpu":
            given = download_bytes(given)  # one transfer for all of them
        torch._foreach_copy_(slots, given)
        self._written += 1

    def sample(self, counter: int, count: int, steps: int = 1, discount: float = 1.0) -> dict[str, Any]:
        """Draw `count` transitions of each lane, each as likely as the others and perhaps twice; [L x M, ...] each.

        What is drawn is valid until the next draw.

        `reward` is the discounted sum over up to `steps` steps, which end with the episode or with the newest row;
        `next_obs` is what followed the last of them, and `discount` what its value counts: 0 after a termination.
        """
        if (self._written != self._stop).any() or not self._stop:
            raise ValueError(f"there is nothing to draw from: lanes have written {self._written.tolist()} steps.")
        held = min(self._stop, self.rows)
        rewards = self.buffers["reward"]
        if self.device.type != "cpu":
            starts = self._streams.integers(counter, held * self.envs, count, device=self.device)  # [L, M]
            ends = self.buffers["terminated"].flatten(), self.buffers["truncated"].flatten()
            targets = n_step_targets(starts, self._ring, steps, discount, *ends, _by_agent(rewards))
            drawn = {name: _gather(rings, targets.first) for name, rings in self.buffers.items() if name not in OUTCOME}
            reward = targets.reward.view(-1, *rewards.shape[3:])
            following = _gather(self.buffers["next_obs"], targets.last)
            return drawn | {"reward": reward, "next_obs": following, "discount": targets.discount}
        draws = self._streams.integers(counter, held * self.envs, count).numpy()  # [L, M]
        total = torch.empty(draws.size, *rewards.shape[3:])
        picks, lasts = np.empty(draws.size, np.int64), np.empty(draws.size, np.int64)
        weights = torch.empty(draws.size)
        ends = self.buffers["terminated"].flatten().numpy(), self.buffers["truncated"].flatten().numpy()
        each = _by_agent(rewards).numpy(), total.view(draws.size, -1).numpy()
        _accumulate(draws, self._ring, steps, discount, *ends, *each, picks, lasts, weights.numpy())

        first, last = torch.from_numpy(picks), torch.from_numpy(lasts)
        batch = {name: _gather(rings, first) for name, rings in self.buffers.items() if name not in OUTCOME}
        batch |= {"reward": total, "next_obs": _gather(self.buffers["next_obs"], last), "discount": weights}
        return dict(self._upload(batch))

    def slices(self, counter: int, count: int, steps: int) -> dict[str, Any]:
        """Draw `count` stretches of `steps` steps of each lane that lie in one episode; [L x M, steps, ...] each.

        `obs` has one more: what followed the last step. Each stretch is as likely as the others. `whole` [L x M] says
        whether a stretch is one: where no episode of a lane is that long, those drawn are to count nothing.
        """
        held = min(self._stop, self.rows)
        if (self._written != self._stop).any() or held < steps:
            raise ValueError(f"there are no {steps} steps to draw: lanes have written {self._written.tolist()}.")
        # [L, M, tries]
        tries = self._streams.integers(counter, (held - steps + 1) * self.envs, count, _TRIES, device=self.device)
        ends = self.buffers["terminated"].flatten(), self.buffers["truncated"].flatten()
        if self.device.type == "cpu":
            places, found = np.empty((*tries.shape[:2], steps), np.int64), np.ones(tries.shape[:2], np.bool_)
            _follow(tries.numpy(), self._ring, steps, ends[0].numpy(), ends[1].numpy(), places, found)
            flat, whole = torch.from_numpy(places.reshape(-1, steps)), torch.from_numpy(found.reshape(-1))
        else:
            flat, whole = stretches(tries, self._ring, steps, *ends)
        batch = {
            name: tree_map(lambda x: x.unflatten(0, flat.shape), _gather(rings, flat.flatten()))
            for name, rings in self.buffers.items()
            if name != "next_obs"
        }
        last = _gather(self.buffers["next_obs"], flat[:, -1])
        batch["obs"] = tree_map(lambda x, y: torch.cat([x, y.unsqueeze(1)], 1), batch["obs"], last)
        batch["whole"] = whole
        return dict(self._upload(batch)) if self.device.type == "cpu" else batch

    # -- state ---------------------------------------------------------------------------------------------------------

    def lane_state(self, lane: int) -> LaneState:
        """How many rows a lane has written, and those that are there."""
        place = self._lanes.local.index(lane)
        stop = int(self._written[place])
        state: dict[str, Tensor | AppendOnlyTensor] = {"written": torch.tensor(stop)}
        for name, ring in named_leaves(self.buffers).items():
            state[name] = AppendOnlyTensor(max(0, stop - self.rows), stop, partial(_read, ring[place]), self.rows)
        return state

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        place, owner = self._lanes.local.index(lane), f"replay, lane {lane}"
        rings = {name: ring[place] for name, ring in named_leaves(self.buffers).items()}
        if state.keys() != rings.keys() | {"written"} or state["written"].shape != ():
            raise ValueError(f"{owner}: the saved transitions have other parts than {', '.join(rings)}.")
        stop = int(state["written"])
        if not 0 <= stop < 2**62:
            raise ValueError(f"{owner}: {stop} steps cannot have been written.")
        held = min(stop, self.rows)
        for name, ring in rings.items():
            saved = state[name]
            if saved.dtype != ring.dtype or saved.shape != (held, *ring.shape[1:]):
                raise ValueError(
                    f"{owner}: {name} was saved as {saved.dtype} {tuple(saved.shape)} and is {ring.dtype} "
                    f"{(held, *ring.shape[1:])} here.\nResume a run with the configuration it was started with."
                )
        for name, ring in rings.items():
            _write(ring, stop - held, state[name])
        self._written[place] = stop


@njit(cache=True, nogil=True)
def _accumulate(
    draws: Any,
    ring: RingBuffer,
    steps: int,
    discount: float,
    terminated: Any,
    truncated: Any,
    rewards: Any,
    total: Any,
    picks: Any,
    lasts: Any,
    weights: Any,
) -> None:
    """Follow each draw [L, M] for up to `steps` steps: its place, the last one, the sum, what comes after counts."""
    sample = 0
    for lane in range(draws.shape[0]):
        for draw in draws[lane]:
            number, env = ring.first + draw // ring.envs, draw % ring.envs
            total[sample], weight = 0.0, 1.0
            for ahead in range(min(steps, ring.stop - number)):  # never beyond the newest row
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


@njit(cache=True, nogil=True)
def _follow(draws: Any, ring: RingBuffer, steps: int, terminated: Any, truncated: Any, places: Any, whole: Any) -> None:
    """Places of the steps from the first of each sample's tries [L, M, tries] whose episode goes on for long enough.

    Where none does, the next one that does is looked for, step by step, and if there is none at all, it is not whole.
    """
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


def _choose_device(wanted: str, learner: torch.device, size: int) -> torch.device:
    """Where rings of so many bytes are kept for a learner on some device."""
    if wanted == "cpu" or learner.type != "cuda":
        return torch.device("cpu")
    fits = wanted == "cuda" or size <= torch.cuda.mem_get_info(learner)[0] // 2
    return learner if fits else torch.device("cpu")


def _by_agent(rewards: Tensor) -> Tensor:
    """Rewards of rings [L, T, E, ...] as [places, A]."""
    return rewards.flatten(0, 2).view(-1, rewards.shape[3:].numel())


def _gather(rings: Any, places: Tensor) -> Any:
    """What lies at places in rings [L, T, E, ...], counted through all of them."""
    return tree_map(lambda x: x.flatten(0, 2).index_select(0, places), rings)


def _parts(size: int, start: int, stop: int) -> list[slice]:
    """Where the rows from one number up to another lie in a ring: one stretch, or two where it begins anew."""
    first, count = start % size, stop - start
    until = min(first + count, size)
    return [slice(first, until), slice(0, count - (until - first))]


def _read(ring: Tensor, start: int, stop: int) -> Tensor:
    return torch.cat([ring[part] for part in _parts(len(ring), start, stop)]).cpu()


def _write(ring: Tensor, start: int, rows: Tensor) -> None:
    ahead, behind = _parts(len(ring), start, start + len(rows))
    ring[ahead].copy_(rows[: ahead.stop - ahead.start])
    ring[behind].copy_(rows[ahead.stop - ahead.start :])
