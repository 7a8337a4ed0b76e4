"""Process-group interface: collectives, lane iteration, phase timers.

With one process every collective is the identity. Algorithms receive a Runtime, reduce through it and iterate over
lanes. They do not need to know their rank.

Shapes: L local lanes, N samples per lane, K columns of a table. A batch is [L x N, ...], lane after lane.
"""

import json
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config import ConfigError, RunConfig, resolve_lanes
from lockstep.distributed import consistency, exact_sum, fault_injection
from lockstep.distributed.collectives import CompletedHandle, Handle, TrackedHandle
from lockstep.distributed.kv_store import KeyValueStore, heartbeat, wait_with_heartbeat
from lockstep.distributed.process_status import ProcessStatus
from lockstep.distributed.watchdog import COMPILE_TIMEOUT, Watchdog
from lockstep.lanes import Lanes, partition_lanes
from lockstep.launch import device as device_setup
from lockstep.launch.failures import record_failure, to_user_error
from lockstep.launch.hang_report import in_time
from lockstep.launch.kernel_compilation import announce_compilation, share_compilation
from lockstep.launch.private_store import sealed_sockets
from lockstep.launch.process_lifetime import die_with_launcher
from lockstep.launch.rendezvous import join_store, loopback
from lockstep.launch.world import PHASE_BYTES, WorldInfo, enable_crash_traceback, note_backend, open_phase_file
from lockstep.metrics import Metrics, Totals, widen
from lockstep.ops.compilation import Compilation
from lockstep.ops.phase_timer import DeviceTimer, PhaseTimer
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, first_leaf, tree_map
from lockstep.transfer import download


class Runtime:
    """Process group, device, lanes and phase timers of one process of a run."""

    def __init__(
        self,
        run: RunConfig,
        world: WorldInfo,
        device: torch.device,
        store: dist.Store | None = None,
        hosting: range | None = None,
    ) -> None:
        """`run.lanes` must be resolved. `hosting` are the local lanes; default: this rank's partition."""
        self.rank, self.size, self.job_id = world.rank, world.size, world.job_id
        self.device = device
        self.exact = run.reduction == "exact"
        self.nonfinite = run.on_nonfinite
        self.autocast_dtype = half_precision(run.precision, device)
        self.grad_comm_dtype = torch.bfloat16 if run.grad_comm_dtype == "bf16" else None
        self.bucket_bytes = int(run.grad_bucket_mb * 2**20)
        lanes = run.lanes or 0
        self.lanes = Lanes(lanes, hosting or partition_lanes(lanes, world.size)[world.rank], run.seed)
        self.status = ProcessStatus(world.rank, world.size, device)
        self.collective_log = self.status.collective_log
        self.timer = DeviceTimer() if device.type == "cuda" else PhaseTimer()
        """Seconds by phase. The time of a nested phase does not count for the outer phase."""
        self.bytes_reduced: Counter[tuple[str, int]] = Counter()
        """Reductions by name and bytes since the caller last cleared it. Also counted on one process."""
        self.pending_messages: list[str] = []
        """Messages that the logger has not written yet."""
        self.compilation = Compilation(run.compile, device, self.phase, self.pending_messages)
        self.before_update: Callable[..., None] | None = None
        """Called before every optimizer step with optimizer, loss, batch and where; only in a replay."""
        self.halted: Tensor | None = None
        """Device flag: 1.0 once a step was skipped and the run must stop. All later steps are skipped, too."""
        self._timeout = run.collective_timeout
        self._store = store or dist.HashStore()
        self._phase_file: mmap.mmap | None = None
        """Memory map in which the outermost phase is stored. The launcher reads it after a crash."""
        self._fault_injector = fault_injection.read(world)
        self._over_host = False
        """Whether CUDA tensors are reduced through host memory, because processes share a GPU."""
        self._inside_lane = False
        self._main_calls = 0
        self.watchdog = Watchdog(self.status, run.collective_timeout, run.max_hours)

    @classmethod
    @contextmanager
    def start(cls, run: RunConfig) -> Iterator["Runtime"]:
        """Join the process group of this run; leave it when the block ends."""
        world = WorldInfo.from_environment()
        if world.launched:
            die_with_launcher()
            enable_crash_traceback(world)
            share_compilation()
        device = device_setup.choose_device(run.device, world, run.share_gpu)
        device_setup.configure_torch(run, world)
        run = resolve_lanes(run, world.size)
        store, backend = None, ""
        if world.size > 1:
            if world.local_size == world.size:
                os.environ.update(loopback())
            # The watchdog aborts a run at the timeout, with a report. The backend's timeout is a later fallback.
            timeout = timedelta(
                seconds=15.0 + max(run.collective_timeout, 0.0 if run.compile == "off" else COMPILE_TIMEOUT)
            )
            store = dist.PrefixStore("lockstep", join_store(world, run.collective_timeout))
            shared = device_setup.share_gpus(store, world, device, run.share_gpu)
            backend = device_setup.choose_backend(device, shared)
            device_id = device if "nccl" in backend else None
            with sealed_sockets(backend):
                dist.set_debug_level_from_env()  # torch reads it when imported, which may be before `--debug` set it
                dist.init_process_group(
                    backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout, device_id=device_id
                )
        note_backend(world, backend)
        runtime = cls(run, world, device, store)
        runtime._over_host = device.type == "cuda" and "nccl" not in backend
        runtime._phase_file = open_phase_file(world)
        announce_compilation(runtime.phase)
        try:
            with runtime.watchdog.watching():
                yield runtime
        except BaseException as error:
            # Record the failure first: leaving the group may block, and the launcher must learn the first cause.
            record_failure(to_user_error(error, world) if isinstance(error, Exception) else error)
            if backend:
                _abandon_group()
            raise
        if backend:
            dist.destroy_process_group()

    @classmethod
    def single_process(cls, run: RunConfig, device: str = "cpu", hosting: range | None = None) -> "Runtime":
        """Create a runtime with one process and no process group, ignoring the environment variables of launchers."""
        return cls(resolve_lanes(run, 1), WorldInfo(), torch.device(device), hosting=hosting)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs, prints and saves."""
        return self.rank == 0

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over processes, in place."""
        return self._all_reduce("sum", tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over processes, in place."""
        return self._all_reduce("max", tensor, dist.ReduceOp.MAX)

    def exact_sum(self, table: Tensor) -> Tensor:
        """Sum a table [L, K] over all lanes of the run; return [K] float64 on the host.

        Each sum is rounded once, so its bits do not depend on the number of processes. Waits for the table's device.
        """
        self._forbid_inside_lane()
        with self.phase("reduce"):
            rows = widen(table.detach()).cpu().double().numpy()
            if self.size == 1:
                self.bytes_reduced["pool", 8 * rows.shape[1] * (exact_sum.LIMBS + 1)] += 1  # as with several processes
                sums = exact_sum.local_sum(rows)
            else:
                limbs = torch.from_numpy(exact_sum.to_limbs(rows))
                self._start_sum("pool", limbs).wait()
                sums = exact_sum.from_limbs(limbs.numpy())
            return torch.tensor(sums, dtype=torch.float64)

    def all_reduce_any(self, **flags: bool) -> dict[str, bool]:
        """Return each flag, true if it is true on any process. The watchdog counts this as the end of an iteration."""
        self.watchdog.mark_iteration_end()
        values = torch.tensor([int(flag) for flag in flags.values()])
        return dict(zip(flags, self.all_reduce_max(values).bool().tolist(), strict=True))

    def all_gather_json(self, value: Any) -> list[Any]:
        """Gather one JSON value from every process, ordered by rank."""
        self._forbid_inside_lane()
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        text = json.dumps(value).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(text)
        width = int(self.all_reduce_sum(lengths).max())
        sent = torch.zeros(width, dtype=torch.uint8)
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = [torch.empty_like(sent) for _ in range(self.size)]
        self.collective_log.wait(self.collective_log.begin("gather"), "gather", lambda: dist.all_gather(gathered, sent))
        pairs = zip(gathered, lengths.tolist(), strict=True)
        return [json.loads(bytes(text[:length].tolist())) for text, length in pairs]

    def run_on_main(self, work: Callable[[], Any]) -> Any:
        """Call a function on the main process only; every process returns its JSON result or raises its error.

        There is no time limit: the other processes wait at the store, not in a collective that would time out.
        """
        self._forbid_inside_lane()
        if self.size == 1:
            return json.loads(json.dumps(work()))
        self._main_calls += 1
        number = self.collective_log.begin("from_main")
        key, beat_key = f"main/{self._main_calls}", f"main/{self._main_calls}/beat"
        if self.is_main:
            with heartbeat(self.kv_store(), beat_key, self._timeout):
                try:
                    text = json.dumps({"result": work()})
                except Exception as error:
                    self.kv_store().set(key, json.dumps({"error": str(error), "kind": type(error).__name__}))
                    raise
            self.kv_store().set(key, text)
            return json.loads(text)["result"]  # same types as on the other ranks: lists for tuples, string keys
        timeout_message = f"the main process sent no heartbeat for {self._timeout:.0f} s during run_on_main"
        text = self.collective_log.wait(
            number,
            "from_main",
            lambda: wait_with_heartbeat(
                self.kv_store(), key, beat_key, self._timeout, timeout_message, self.watchdog.note_progress
            ),
        )
        answer = json.loads(text)
        if "error" in answer:
            kinds = {kind.__name__: kind for kind in (ConfigError, FileExistsError, FileNotFoundError, ValueError)}
            raise kinds.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["result"]

    def reduce_metrics(self, metrics: Metrics) -> Totals:
        """Return sums and counts over the whole run, by name."""
        pairs = metrics.global_sums
        tables = download([*pairs.values(), *metrics.per_lane.values()])  # one transfer for all of them
        pairs = dict(zip(pairs, tables, strict=False))
        if metrics.per_lane:
            table = torch.cat(tables[len(pairs) :], dim=1)  # [L, 2 x names]
            pairs |= dict(zip(metrics.per_lane, self.exact_sum(table).view(-1, 2), strict=True))
        if not pairs:
            return {}
        rows = torch.stack(list(pairs.values())).tolist()
        return {name: (total, count) for name, (total, count) in zip(pairs, rows, strict=True)}

    def check_replicas(self, state: StateDict, where: str) -> None:
        """Compare fingerprints of replicated tensors over all processes. Raise ReplicaMismatchError if any differ."""
        self._forbid_inside_lane()
        if self.size == 1:
            self.bytes_reduced["max", 2 * 8 * len(state)] += 1
            return
        with self.phase("check"):
            local = consistency.fingerprints(state)
            # One reduction for maximum and minimum. ~x is -(x + 1): unlike -x, it does not overflow.
            largest, smallest = self.all_reduce_max(torch.cat([local, ~local])).chunk(2)
            if not torch.equal(largest, ~smallest):
                raise consistency.ReplicaMismatchError(
                    consistency.format_mismatch(self.all_gather_json(local.tolist()), list(state), where)
                )

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def iter_lanes(self, batch: Tree) -> Iterator[Tree]:
        """Yield the parts of a batch for a network: the whole [L x N, ...], or in exact mode one lane at a time.

        A collective inside the loop raises an error, because processes may have different numbers of lanes.
        """
        for part in self._lane_parts(batch) if self.exact else (batch,):
            outer, self._inside_lane = self._inside_lane, True
            try:
                yield part
            finally:
                self._inside_lane = outer

    def map_lanes(self, function: Callable[[Any], Tree], batch: Tree) -> Any:
        """Apply a function to the parts that `iter_lanes` yields and concatenate the results, [L x N, ...]."""
        outputs = [function(part) for part in self.iter_lanes(batch)]
        return tree_map(lambda *lanes: torch.cat(lanes), *outputs) if self.exact else outputs[0]

    def _lane_parts(self, batch: Tree) -> Iterator[Tree]:
        """Yield the part of every local lane of a batch [L x N, ...]."""
        samples, rest = divmod(len(first_leaf(batch)), len(self.lanes))
        if rest:
            raise ValueError(
                f"a batch of {len(first_leaf(batch))} samples cannot be split into {len(self.lanes)} equal lanes.\n"
                "Give every lane the same number of samples."
            )
        for start in range(0, samples * len(self.lanes), samples):
            # Contiguous, because torch sums strided tensors in a different order.
            yield tree_map(lambda x, s=start: x[s : s + samples].contiguous(), batch)

    # -- phases, precision, store --------------------------------------------------------------------------------------

    def phase(self, name: str) -> "Phase":
        """Return a context manager that names a phase, for phase timers, hang reports and fault injection."""
        return Phase(self, name)

    def fault_point(self, name: str) -> None:
        """Count a passage of this point; inject a fault if one is configured here."""
        self.status.phase_counts[name] = self.status.phase_counts.get(name, 0) + 1
        if self.status.phase_counts[name] == 1:  # the launcher must know the deadline before anything can block
            self.watchdog.send_progress()
        if self._fault_injector is not None:
            self._fault_injector.at(name, self.status.phase_counts[name])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of `run.precision`."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def kv_store(self) -> KeyValueStore:
        """Return a key-value store for the calling thread."""
        return KeyValueStore(self._store.clone())  # type: ignore[attr-defined]

    def _start_sum(self, name: str, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Handle:
        """Start an asynchronous all-reduce of a tensor, in place. The optimizer overlaps it with backward."""
        self.bytes_reduced[name, tensor.nbytes] += 1
        if self.size == 1:
            return CompletedHandle()
        if tensor.is_cuda and self._over_host:
            return TrackedHandle(self.collective_log, name, _OverHost(tensor, operation))
        return TrackedHandle(
            self.collective_log, name, dist.all_reduce(tensor, operation, async_op=True), on_device=tensor.is_cuda
        )

    def _all_reduce(self, name: str, tensor: Tensor, operation: Any) -> Tensor:
        self._forbid_inside_lane()
        with self.phase("reduce"):
            self._start_sum(name, tensor, operation).wait()
        return tensor

    def _forbid_inside_lane(self) -> None:
        if self._inside_lane:
            raise RuntimeError(
                "a collective was called inside iter_lanes or a loss, where processes may be at different lanes.\n"
                "Accumulate the values in the loop, and reduce them after it."
            )


class Phase:
    """Context manager of a named phase. A class, because rollouts enter hundreds and generators cost twice as much."""

    __slots__ = ("_name", "_runtime")

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime, self._name = runtime, name

    def __enter__(self) -> None:
        runtime = self._runtime
        runtime.fault_point(self._name)
        runtime.status.progress += 1
        self._switch_timer()
        runtime.status.phases.append(self._name)
        if runtime._phase_file is not None and len(runtime.status.phases) == 1:
            runtime._phase_file[:] = self._name.ljust(PHASE_BYTES)[:PHASE_BYTES].encode()

    def __exit__(self, *_: object) -> None:
        self._switch_timer()
        self._runtime.status.progress += 1
        self._runtime.status.phases.pop()

    def _switch_timer(self) -> None:
        """Add the time since the last phase change to the innermost phase."""
        phases = self._runtime.status.phases
        self._runtime.timer.switch(phases[-1] if phases else None)


class _OverHost:
    """Reduction of a CUDA tensor through a copy in host memory."""

    def __init__(self, tensor: Tensor, operation: Any) -> None:
        self._tensor, self._copy = tensor, tensor.to("cpu")
        self._work = dist.all_reduce(self._copy, operation, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._copy)


def _abandon_group() -> None:
    """Leave the process group after a failure, within a few seconds.

    Destroying the group would wait for launched collectives, which may wait for a dead process.
    """

    def abort() -> None:
        with suppress(Exception):  # the failure that led here is the one to report
            dist.distributed_c10d._abort_process_group()

    in_time(abort)


def half_precision(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype of networks; None for fp32."""
    if precision == "amp":
        # GPUs before Ampere emulate bf16, which is slower than fp32.
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if native or device.type == "cpu" else "fp16"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
