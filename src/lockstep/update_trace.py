"""Trace of optimizer updates in a replay: fingerprints of what goes into each, or a dump of one with all its tensors.

`lockstep replay` and `lockstep bisect` train again with a trace. It changes nothing that the updates compute. An update
is counted as in `Algorithm.updates`; an algorithm with several optimizers takes a step with each in one update.
"""

import json
import pdb
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.base import Algorithm, VecEnv
from lockstep.checkpoint import format as form
from lockstep.checkpoint.snapshot import snapshot_shared, split_lane_state
from lockstep.clock import TrainState
from lockstep.distributed import DistributedOptimizer, Runtime
from lockstep.distributed.consistency import fold
from lockstep.distributed.lane_gradients import lane_batches
from lockstep.io.jsonl import append_jsonl
from lockstep.io.printable import print_line
from lockstep.protocols import LossFunction, StateDict
from lockstep.pytree import Tree, named_leaves

DIGEST_LENGTH = 16


@dataclass(frozen=True)
class TraceOptions:
    """What a trace writes. It is passed to worker processes as JSON."""

    directory: str
    update: int | None = None
    """Update to dump, after which the run stops at the end of its iteration. None: log digests of all updates."""
    debug: bool = False
    """Open the Python debugger in that update."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class UpdateTrace:
    """Called by every optimizer before each step."""

    def __init__(
        self, options: TraceOptions, algorithm: Algorithm, task: VecEnv, clock: TrainState, runtime: Runtime
    ) -> None:
        self._options, self._algorithm, self._task, self._clock, self._runtime = (
            options,
            algorithm,
            task,
            clock,
            runtime,
        )
        self._directory = Path(options.directory)
        self._update, self._step = 0, 0

    def __call__(self, optimizer: DistributedOptimizer, loss: LossFunction, batch: Tree, where: str) -> None:
        update = max(self._algorithm.updates, int(optimizer.updates) + 1)
        self._step = self._step + 1 if update == self._update else 1
        self._update = update
        names = {
            **{"iteration": self._clock.iteration + 1, "update": update, "step": self._step},
            **{"loss": getattr(loss, "__name__", "loss"), "where": where},
        }
        if self._options.update is None:
            self._log_digests(names, batch)
        elif update == self._options.update:
            self._dump(names, optimizer, loss, batch)
            if self._options.debug:
                self._debug(optimizer, loss, batch, where)
            self._runtime.status.stop_requested = True  # at the end of this iteration

    def _log_digests(self, names: dict[str, Any], batch: Tree) -> None:
        """Append the digests of an update: of the agent before it, and of every tensor of the batch by lane."""
        digests = {
            form.lane_prefix(lane) + name: form.digest_tensor("", tensor)[:DIGEST_LENGTH]
            for lane, part in lane_batches(self._runtime, batch)
            for name, tensor in named_leaves(part).items()
        }
        agent = f"{fold(self._algorithm.shared_state()):016x}"
        append_jsonl(self._directory / f"{self._lanes()}.jsonl", {**names, "agent": agent, "batch": digests})

    def _dump(self, names: dict[str, Any], optimizer: DistributedOptimizer, loss: LossFunction, batch: Tree) -> None:
        """Write everything that goes into one step, and the loss and gradient of every lane."""
        directory = self._directory / f"{names['step']}-{names['loss']}"
        directory.mkdir(parents=True, exist_ok=True)
        tensors: StateDict = {}
        sums: dict[str, dict[str, float]] = {}
        for lane, part, terms, gradients in optimizer.lane_gradients(loss, batch):
            prefix = form.lane_prefix(lane)
            sums[str(lane)] = {name: float(term) for name, term in terms.items()}
            tensors |= {f"{prefix}batch.{name}": x for name, x in named_leaves(part).items()}
            tensors |= {f"{prefix}gradient.{name}": x for name, x in gradients.items()}
            tensors |= {f"{prefix}loss.{name}": x for name, x in terms.items()}
        states, _ = split_lane_state(self._algorithm, self._task, self._runtime.lanes.local)
        copied = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()}
        form.write_tensors(directory / f"{self._lanes()}.safetensors", copied)
        form.write_tensors(directory / f"{self._lanes('states')}.safetensors", states)
        (directory / f"{self._lanes()}.json").write_text(json.dumps(names | {"lanes": sums}))
        if self._runtime.is_main:
            form.write_tensors(directory / form.SHARED, snapshot_shared(self._algorithm, self._task))

    def _lanes(self, what: str = "lanes") -> str:
        """Return the name of a file of this process, without its suffix."""
        local = self._runtime.lanes.local
        return f"{what}-{local.start:04d}-{local.stop - 1:04d}"

    def _debug(self, optimizer: DistributedOptimizer, loss: LossFunction, batch: Tree, where: str) -> None:
        """Open the debugger in the optimizer's step. `up` leads to the algorithm's update."""
        frame = sys._getframe(2)
        print_line(f"update {self._update}, {getattr(loss, '__name__', 'loss')} {where}")
        pdb.Pdb(nosigint=True).set_trace(frame)
