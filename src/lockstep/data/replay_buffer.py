"""Replay buffer: the most recent transitions, in one ring per lane.

Every environment adds one transition per step, so all lanes hold the same number and the global count needs no
collective. Samples are a pure function of seed, lane and a counter. The next observation of a transition is `final_obs`
if its episode ended.

Shapes: L local lanes, E environments per lane, B = L x E, T rows of a ring (one step of a lane), M samples per lane.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.data.nonfinite import locate_nonfinite, value_range
from lockstep.data.replay_sampling import RingBuffer, n_step_targets, valid_sequences
from lockstep.data.rollout import Rollout
from lockstep.distributed import DistributedOptimizer
from lockstep.lanes import Lanes
from lockstep.protocols import AppendOnlyTensor, LaneState, StateDict, Step
from lockstep.pytree import leaves, named_leaves, tree_map, tree_where
from lockstep.transfer import Uploader, download_bytes

_TRIES = 16
"""Random starts drawn per sequence. The first whose sequence lies in one episode is used."""
OUTCOME = ("reward", "terminated", "truncated", "next_obs")
"""Parts of a transition used for n-step targets; all others are observations and actions."""


def outcome(step: Step) -> dict[str, Any]:
    """Return the parts of a transition that follow the action, [B, ...] each. A team has one reward per agent."""
    if step.active is not None:
        raise ConfigError("agents of this task come and go, which off-policy algorithms do not support.", "Use PPO.")
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
    """Write a rollout to replay, unless any process has non-finite values in it; return whether it was written.

    Non-finite values would stay in replay for long. The optimizer's policy decides how many such rollouts may be
    skipped before the run stops.
    """
    lanes, buffers = optimizer.runtime.lanes, rollout.buffers | outcomes.buffers
    table = value_range(buffers).expand(len(lanes), 1)
    if optimizer.runtime.exact_sum(table).isfinite().all():
        for t in range(rollout.horizon):
            replay.write(tree_map(lambda x, t=t: x[t], buffers))
        return True
    inputs = {"observation": rollout["obs"], "reward": outcomes["reward"], "next observation": outcomes["next_obs"]}
    update = int(optimizer.updates) + 1
    optimizer.nonfinite_policy.handle(
        f"iteration {clock.iteration + 1}, before update {update}, has a rollout that is not finite:",
        locate_nonfinite(inputs, lanes.local) or locate_nonfinite({"action": rollout["action"]}, lanes.local),
        "Fix the environment, or use --run.on-nonfinite skip to skip such iterations.",
        {"rollout": buffers},
    )
    return False


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Storage of the replay buffer."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that stores replay. auto: the GPU of each process if its share takes at most half of the free GPU memory,
    otherwise host memory. Sampled values do not depend on it."""


class Replay:
    """Preallocated rings of transitions, in host memory or on the device that trains."""

    def __init__(
        self,
        capacity: int,
        lanes: Lanes,
        example: dict[str, Any],
        purpose: str = "replay",
        config: ReplayConfig | None = None,
        learner: torch.device | None = None,
    ) -> None:
        """Allocate the rings.

        `capacity` counts transitions of the whole run, rounded down to whole steps. `example` is a batch of transitions
        with the names, shapes and dtypes to store. Samples are returned on device `learner`, by default the CPU.
        """
        self._lanes, self._streams = lanes, lanes.streams(purpose)
        self._learner = learner or torch.device("cpu")
        self._upload = Uploader(self._learner)
        self.envs = len(example["reward"]) // len(lanes)
        self.rows = capacity // (lanes.num_lanes * self.envs)
        if self.rows < 1:
            raise ConfigError(
                f"a replay buffer of {capacity} transitions cannot hold one step of {lanes.num_lanes * self.envs} "
                "environments.",
                f"Use {lanes.num_lanes * self.envs} or more.",
            )
        shape = (len(lanes), self.rows, self.envs)
        row = sum(leaf[:1].nbytes for leaf in leaves(example))
        self.device = _choose_device((config or ReplayConfig()).device, self._learner, math.prod(shape) * row)
        # Lane-major, so that the ring of a lane is one block. The OS allocates host memory only as it is written.
        self.buffers: dict[str, Any] = tree_map(
            lambda x: torch.empty(*shape, *x.shape[1:], dtype=x.dtype, device=self.device), example
        )
        self._written = np.zeros(len(lanes), np.int64)
        """[L] rows written since the start of the run. Equal for all lanes, but saved with each lane."""
        self._stop_on_device = torch.zeros((), dtype=torch.int64, device=self.device)
        """The same number for all lanes, for CUDA graphs."""

    @property
    def count(self) -> int:
        """Number of stored transitions over all lanes of the run."""
        return min(self._stop, self.rows) * self.envs * self._lanes.num_lanes

    @property
    def _stop(self) -> int:
        return int(self._written[0])

    @property
    def _ring(self) -> RingBuffer:
        return RingBuffer(max(0, self._stop - self.rows), self._stop, self.rows, self.envs)

    def write(self, values: dict[str, Any]) -> None:
        """Add one step of every environment, [B, ...] each. Full rings overwrite their oldest row."""
        row = self._stop % self.rows
        slots = [ring[:, row] for ring in leaves(self.buffers)]
        rows = [value.unflatten(0, (-1, self.envs)) for value in leaves(values)]
        if self.device.type == "cpu" and self._learner.type != "cpu":
            rows = download_bytes(rows)  # one transfer for all tensors
        torch._foreach_copy_(slots, rows)
        self._written += 1
        if self.device.type != "cpu":  # only CUDA graphs read it
            self._stop_on_device += 1

    def sample(self, counter: int, count: int, steps: int = 1, discount: float = 1.0) -> dict[str, Any]:
        """Sample `count` transitions of each lane uniformly with replacement; see `transitions`."""
        return self.transitions(self.draw(counter, count), steps, discount)

    def draw(self, counter: int, count: int) -> Tensor:
        """Draw `count` stored steps of each lane uniformly with replacement, [L, M]."""
        if (self._written != self._stop).any() or not self._stop:
            raise ValueError(f"there is nothing to sample from: lanes have written {self._written.tolist()} steps.")
        return self._streams.integers(counter, min(self._stop, self.rows) * self.envs, count, device=self.device)

    def transitions(self, starts: Tensor, steps: int, discount: float, in_graph: bool = False) -> dict[str, Any]:
        """Return the transitions from each start on, [L x M, ...] each. They are valid until the next call.

        `reward` is the discounted sum over up to `steps` steps, which stop at the episode's end or the newest row.
        `next_obs` follows the last of them. `discount` is the factor of its bootstrap value: 0 after a termination.
        With `in_graph`, the position in the ring is read on the device, so that a CUDA graph can capture the call.
        """
        ring = self._ring
        if in_graph:
            ring = ring._replace(first=(self._stop_on_device - self.rows).clamp(min=0), stop=self._stop_on_device)
        reward, first, last, bootstrap = n_step_targets(starts, ring, steps, discount, self.buffers)
        batch = {name: _gather(rings, first) for name, rings in self.buffers.items() if name not in OUTCOME}
        batch |= {"reward": reward, "next_obs": _gather(self.buffers["next_obs"], last), "discount": bootstrap}
        return dict(self._upload(batch)) if self.device.type == "cpu" else batch

    def slices(self, counter: int, count: int, steps: int) -> dict[str, Any]:
        """Sample `count` sequences of `steps` steps of each lane, each within one episode, [L x M, steps, ...] each.

        `obs` has one more step: the observation after the last step. Valid starts are equally likely. `whole` [L x M]
        is a mask: if no episode of a lane is long enough, its sequences are invalid and must have weight 0.
        """
        stored = min(self._stop, self.rows)
        if (self._written != self._stop).any() or stored < steps:
            raise ValueError(f"there are no {steps} steps to sample: lanes have written {self._written.tolist()}.")
        # [L, M, tries]
        tries = self._streams.integers(counter, (stored - steps + 1) * self.envs, count, _TRIES, device=self.device)
        flat, whole = valid_sequences(tries, self._ring, steps, self.buffers)
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
        """Return the number of rows that a lane has written, and its stored rows."""
        position = self._lanes.local.index(lane)
        stop = int(self._written[position])
        state: dict[str, Tensor | AppendOnlyTensor] = {"written": torch.tensor(stop)}
        for name, ring in named_leaves(self.buffers).items():
            state[name] = AppendOnlyTensor(max(0, stop - self.rows), stop, partial(_read, ring[position]), self.rows)
        return state

    def load_lane_state(self, lane: int, state: StateDict) -> None:
        position, owner = self._lanes.local.index(lane), f"replay, lane {lane}"
        rings = {name: ring[position] for name, ring in named_leaves(self.buffers).items()}
        if state.keys() != rings.keys() | {"written"} or state["written"].shape != ():
            raise ValueError(f"{owner}: the saved transitions have other tensors than {', '.join(rings)}.")
        stop = int(state["written"])
        if not 0 <= stop < 2**62:
            raise ValueError(f"{owner}: {stop} is not a valid number of written steps.")
        stored = min(stop, self.rows)
        for name, ring in rings.items():
            saved = state[name]
            if saved.dtype != ring.dtype or saved.shape != (stored, *ring.shape[1:]):
                raise ValueError(
                    f"{owner}: {name} was saved as {saved.dtype} {tuple(saved.shape)} and is {ring.dtype} "
                    f"{(stored, *ring.shape[1:])} here.\nResume a run with the configuration it was started with."
                )
        for name, ring in rings.items():
            _write(ring, stop - stored, state[name])
        self._written[position] = stop
        self._stop_on_device.fill_(stop)


def _choose_device(setting: str, learner: torch.device, size: int) -> torch.device:
    """Choose the device that stores rings of `size` bytes for training on device `learner`."""
    if setting == "cpu" or learner.type != "cuda":
        return torch.device("cpu")
    fits = setting == "cuda" or size <= torch.cuda.mem_get_info(learner)[0] // 2
    return learner if fits else torch.device("cpu")


def _gather(rings: Any, indices: Tensor) -> Any:
    """Select the entries at flat `indices` from rings [L, T, E, ...]."""
    return tree_map(lambda x: x.flatten(0, 2).index_select(0, indices), rings)


def _parts(size: int, start: int, stop: int) -> list[slice]:
    """Return the slices of a ring that hold rows `start` up to `stop`; the second is empty unless they wrap around."""
    first, count = start % size, stop - start
    end = min(first + count, size)
    return [slice(first, end), slice(0, count - (end - first))]


def _read(ring: Tensor, start: int, stop: int) -> Tensor:
    return torch.cat([ring[part] for part in _parts(len(ring), start, stop)]).cpu()


def _write(ring: Tensor, start: int, rows: Tensor) -> None:
    head, tail = _parts(len(ring), start, start + len(rows))
    ring[head].copy_(rows[: head.stop - head.start])
    ring[tail].copy_(rows[head.stop - head.start :])
