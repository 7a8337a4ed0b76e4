"""Digest log: fingerprints of the agent and its metrics, which show where two runs differ without their checkpoints.

`digests.jsonl` has a line {"samples", "iteration", "updates", "agent", "metrics"} before the first iteration, and one
for every iteration that crosses a multiple of `run.digest_every` samples. `updates` is the number of updates so far,
`agent` a 64-bit fingerprint of networks, optimizers and normalizers, and `metrics` one of this iteration's metrics,
pooled over lanes. They do not depend on times, paths and starts, so a resumed run writes the same file as the
uninterrupted one. With `run.reduction=exact` the number of processes does not change them either. With
`run.log_tensor_digests` every iteration has a line, with a digest of every tensor.
"""

import hashlib
import json
from typing import Any

from lockstep.base import Algorithm, VecEnv
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.format import digest_tensor
from lockstep.checkpoint.snapshot import snapshot_lanes, snapshot_shared
from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.distributed.consistency import fold
from lockstep.loggers.process_log import ProcessLog
from lockstep.metrics import Totals


class DigestLog:
    """Writes the digests of a run. Every process has one, and the main process writes."""

    def __init__(self, log: ProcessLog, run: RunConfig, runtime: Runtime, fence: GenerationFence) -> None:
        self._log, self._runtime, self._fence = log, runtime, fence
        self._every, self._tensors = run.digest_every, run.log_tensor_digests

    def record_start(self, clock: TrainState, algorithm: Algorithm, task: VecEnv) -> None:
        """Log the digests before the first iteration; those of every tensor also after a resume, which may be wrong."""
        if self._tensors or (clock.iteration == 0 and self._every):
            self._write(clock, algorithm, task, {})

    def record(self, clock: TrainState, algorithm: Algorithm, task: VecEnv, totals: Totals) -> None:
        """Log the digests of the iteration that has ended, with its pooled metrics, if they are due."""
        if self._tensors or clock.crossed(self._every):
            self._write(clock, algorithm, task, totals)

    def _write(self, clock: TrainState, algorithm: Algorithm, task: VecEnv, totals: Totals) -> None:
        """Write a line, unless a newer start has taken over the run."""
        values: dict[str, Any] = {}
        if self._runtime.is_main:  # replicas are equal, so one process needs no collective
            agent = f"{fold(algorithm.shared_state()):016x}"
            values = {"updates": algorithm.updates, "agent": agent, "metrics": digest_metrics(totals)}
        if self._tensors:
            values |= {"digests": self._digest_tensors(algorithm, task), "passed": self._runtime.status.phase_counts}
        if self._fence.allows_writing():
            self._log.digests(clock, values)

    def _digest_tensors(self, algorithm: Algorithm, task: VecEnv) -> dict[str, str]:
        """Return a digest of every tensor of the run by name."""
        state = snapshot_shared(algorithm, task) | snapshot_lanes(algorithm, task, self._runtime.lanes.local)
        # Exclude the name, so that Lockstep versions with other tensor names can be compared.
        local_digests = {name: digest_tensor("", tensor)[:16] for name, tensor in state.items()}
        merged: dict[str, str] = {}
        for digests in self._runtime.all_gather_json(local_digests):
            merged |= digests
        return merged


def digest_metrics(totals: Totals) -> str:
    """Return a digest of sums and counts by name. JSON writes every bit of a float."""
    return hashlib.blake2b(json.dumps(totals, sort_keys=True).encode(), digest_size=8).hexdigest()
