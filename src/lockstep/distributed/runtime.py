"""Runtime: the one object through which a process knows of the others.

Everything here is the identity when there is one process. Algorithms get it injected: they sum, agree and go lane by
lane, and have no reason to know which process they are on.

Shapes: L local lanes, N samples a lane, K columns of a table. A batch is [L x N, ...], lane after lane.
"""

import json
import mmap
import os
import threading
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
from lockstep.distributed.kv_store import InMemoryStore, KeyValueStore, TorchStore, heartbeat, wait_with_heartbeat
from lockstep.distributed.process_status import ProcessStatus
from lockstep.distributed.watchdog import COMPILE_TIMEOUT, Watchdog
from lockstep.lanes import Lanes, partition_lanes
from lockstep.launch import device as device_setup
from lockstep.launch import world as places
from lockstep.launch.failures import record_failure, to_user_error
from lockstep.launch.kernel_compilation import share_compilation
from lockstep.launch.private_store import sealed_sockets
from lockstep.launch.process_lifetime import die_with_launcher
from lockstep.launch.rendezvous import join_store, loopback
from lockstep.launch.world import WorldInfo
from lockstep.metrics import Metrics, widen
from lockstep.ops.compilation import Compilation
from lockstep.ops.phase_timer import DeviceTimer, HostTimer, PhaseTimer
from lockstep.protocols import StateDict
from lockstep.pytree import Tree, first_leaf, tree_map
from lockstep.transfer import download


class Runtime:
    """The processes of a run, seen from one of them."""

    def __init__(
        self,
        run: RunConfig,
        place: WorldInfo,
        device: torch.device,
        store: dist.Store | None = None,
        hosting: range | None = None,
    ) -> None:
        """`run.lanes` must be settled; `hosting` are the lanes that live here, by default this process's share."""
        self.rank, self.size, self.job_id = place.rank, place.size, place.job_id
        self.device = device
        self.exact = run.reduction == "exact"
        self.nonfinite = run.on_nonfinite
        self.autocast_dtype = half_precision(run.precision, device)
        self.grad_comm_dtype = torch.bfloat16 if run.grad_comm_dtype == "bf16" else None
        self.bucket_bytes = int(run.grad_bucket_mb * 2**20)
        lanes = run.lanes or 0
        self.lanes = Lanes(lanes, hosting or partition_lanes(lanes, place.size)[place.rank], run.seed)
        self.status = ProcessStatus(place.rank, place.size, device)
        self.collective_log = self.status.collective_log
        self.timer: PhaseTimer = DeviceTimer() if device.type == "cuda" else HostTimer()
        """Seconds by phase; a phase inside another counts for itself alone."""
        self.bytes_reduced: Counter[tuple[str, int]] = Counter()
        """Reductions by name and bytes since somebody last emptied it; also on one process, where nothing is sent."""
        self.pending_messages: list[str] = []
        """Sentences for the log, until it has taken them."""
        self.compilation = Compilation(run.compile, device, self.phase, self.pending_messages)
        self.halted: Tensor | None = None
        """On a device, 1.0 once a step that stops the run was skipped there: all steps that follow are skipped, too."""
        self._timeout = run.collective_timeout
        self._store = store
        self._local_mailbox = InMemoryStore()
        self._phase_note: mmap.mmap | None = None
        """Where the outermost of them is written, for the launcher to read after a crash."""
        self._fault_injector = fault_injection.read(place)
        self._over_host = False
        """Whether CUDA tensors are reduced by way of the host, because processes share a GPU."""
        self._inside_lane = False
        self._main_calls = 0
        self.watchdog = Watchdog(self.status, run.collective_timeout, run.max_hours)

    @classmethod
    @contextmanager
    def start(cls, run: RunConfig) -> Iterator["Runtime"]:
        """Join the other processes of this run; leave them when the block ends."""
        place = WorldInfo.from_environment()
        if place.launched:
            die_with_launcher()
            places.enable_crash_traceback(place)
            share_compilation()
        device = device_setup.choose_device(run.device, place, run.share_gpu)
        device_setup.configure_torch(run, place)
        run = resolve_lanes(run, place.size)
        store, backend = None, ""
        if place.size > 1:
            if place.local_size == place.size:
                os.environ.update(loopback())
            # The watchdog ends a run at the timeout, with a report; the backend's own comes only if that fails.
            timeout = timedelta(
                seconds=15.0 + max(run.collective_timeout, 0.0 if run.compile == "off" else COMPILE_TIMEOUT)
            )
            store = dist.PrefixStore("lockstep", join_store(place, run.collective_timeout))
            shared = device_setup.shared_gpus(store, place, device)
            if shared and not run.share_gpu:
                device_setup.refuse_shared(shared)
            backend = device_setup.choose_backend(device, bool(shared))
            bound = device if "nccl" in backend else None
            with sealed_sockets(backend):
                dist.init_process_group(
                    backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout, device_id=bound
                )
        places.note_backend(place, backend)
        runtime = cls(run, place, device, store)
        runtime._over_host = device.type == "cuda" and "nccl" not in backend
        runtime._phase_note = places.open_phase_file(place)
        try:
            with runtime.watchdog.watching():
                yield runtime
        except BaseException as error:
            # Before the group is left, which may take forever: the launcher must learn of the first cause.
            record_failure(to_user_error(error, place) if isinstance(error, Exception) else error)
            if backend:
                _abandon_group()
            raise
        if backend:
            dist.destroy_process_group()

    @classmethod
    def single_process(cls, run: RunConfig, device: str = "cpu", hosting: range | None = None) -> "Runtime":
        """A runtime for plain Python: one process, no process group, whatever the environment says."""
        return cls(resolve_lanes(run, 1), WorldInfo(), torch.device(device), hosting=hosting)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs, prints and saves."""
        return self.rank == 0

    # -- numbers that become the same everywhere ---------------------------------------------------------------------

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, in place."""
        self._all_reduce("sum", tensor, dist.ReduceOp.SUM)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over processes, in place."""
        self._all_reduce("max", tensor, dist.ReduceOp.MAX)
        return tensor

    def exact_sum(self, table: Tensor) -> Tensor:
        """The sum over all lanes of the run of a table [L, K], [K] float64 on the host.

        Rounded once, so the same bits however many processes. Waits for the device that the table is on.
        """
        self._forbid_inside_lane()
        with self.phase("reduce"):
            rows = widen(table.detach()).cpu().double().numpy()
            if self.size == 1:
                self.bytes_reduced["pool", exact_sum.payload_bytes(rows)] += 1
                sums = exact_sum.local_sum(rows)
            else:
                limbs = torch.from_numpy(exact_sum.to_limbs(rows))
                self._start_sum("pool", limbs).wait()
                sums = exact_sum.from_limbs(limbs.numpy())
            return torch.tensor(sums, dtype=torch.float64)

    def all_reduce_any(self, **flags: bool) -> dict[str, bool]:
        """Each flag, true if it is true on any process."""
        self.watchdog.mark_iteration_end()
        votes = torch.tensor([int(flag) for flag in flags.values()])
        return dict(zip(flags, self.all_reduce_max(votes).bool().tolist(), strict=True))

    def all_gather_json(self, value: Any) -> list[Any]:
        """One plain (JSON) value from every process, in order."""
        self._forbid_inside_lane()
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        text = json.dumps(value).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(text)
        width = int(self.all_reduce_sum(lengths).max())
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        self.collective_log.wait(
            self.collective_log.begin("gather"), "gather", lambda: dist.all_gather(everybody, mine)
        )
        pairs = zip(everybody, lengths.tolist(), strict=True)
        return [json.loads(bytes(text[:length].tolist())) for text, length in pairs]

    def run_on_main(self, work: Callable[[], Any]) -> Any:
        """Let the main process do something alone; everybody gets its plain (JSON) result, or its error.

        It may take as long as it likes: the others wait at the store, not in a collective that would time out.
        """
        self._forbid_inside_lane()
        if self.size == 1:
            return json.loads(json.dumps(work()))
        self._main_calls += 1
        number = self.collective_log.begin("from_main")
        key, beat = f"main/{self._main_calls}", f"main/{self._main_calls}/beat"
        if self.is_main:
            with heartbeat(self.kv_store(), beat, self._timeout):
                try:
                    text = json.dumps({"result": work()})
                except Exception as error:
                    self.kv_store().set(key, json.dumps({"error": str(error), "kind": type(error).__name__}))
                    raise
            self.kv_store().set(key, text)
            return json.loads(text)["result"]  # as the others read it: tuples are lists now, and keys are words
        silence = f"the main process has said nothing for {self._timeout:.0f} s while it worked alone"
        text = self.collective_log.wait(
            number,
            "from_main",
            lambda: wait_with_heartbeat(
                self.kv_store(), key, beat, self._timeout, silence, self.watchdog.note_progress
            ),
        )
        answer = json.loads(text)
        if "error" in answer:
            kinds = {kind.__name__: kind for kind in (ConfigError, FileExistsError, FileNotFoundError, ValueError)}
            raise kinds.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["result"]

    def reduce_metrics(self, metrics: Metrics) -> dict[str, tuple[float, float]]:
        """Sums and counts over the whole run, by name."""
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
        """Compare fingerprints of shared tensors over all processes; stop, naming tensor and process, if any differ."""
        self._forbid_inside_lane()
        if self.size == 1:
            self.bytes_reduced["max", consistency.payload_bytes(state)] += 1
            return
        with self.phase("check"):
            mine = consistency.fingerprints(state)
            if not consistency.all_equal(mine, self.all_reduce_max):
                raise consistency.ReplicaMismatchError(
                    consistency.format_mismatch(self.all_gather_json(mine.tolist()), list(state), where)
                )

    # -- lane by lane --------------------------------------------------------------------------------------------------

    def iter_lanes(self, batch: Tree) -> Iterator[Tree]:
        """Parts of a batch for a network: the whole of it, [L x N, ...], or in exact mode one lane after another.

        Processes may host different numbers of lanes: a collective inside the loop might be met by nobody; it raises.
        """
        for part in self._lane_parts(batch) if self.exact else (batch,):
            outer, self._inside_lane = self._inside_lane, True
            try:
                yield part
            finally:
                self._inside_lane = outer

    def map_lanes(self, function: Callable[[Any], Tree], batch: Tree) -> Any:
        """Apply a function to the parts `iter_lanes` yields and put the results together again, [L x N, ...]."""
        outputs = [function(part) for part in self.iter_lanes(batch)]
        return tree_map(lambda *lanes: torch.cat(lanes), *outputs) if self.exact else outputs[0]

    def _lane_parts(self, batch: Tree) -> Iterator[Tree]:
        samples, rest = divmod(len(first_leaf(batch)), len(self.lanes))
        if rest:
            raise ValueError(
                f"a batch of {len(first_leaf(batch))} samples cannot be {len(self.lanes)} lanes, one after another.\n"
                "Give every lane as many samples as the others."
            )
        for start in range(0, samples * len(self.lanes), samples):
            # Contiguous, because a strided lane is summed in another order than a contiguous one.
            yield tree_map(lambda x, s=start: x[s : s + samples].contiguous(), batch)

    # -- around the work -----------------------------------------------------------------------------------------------

    def phase(self, name: str) -> "Phase":
        """Say what this process is doing: for the time split, and for scripted kills."""
        return Phase(self, name)

    def fault_point(self, name: str) -> None:
        """Note that this process came by here; a scripted kill may strike."""
        self.status.phase_counts[name] = self.status.phase_counts.get(name, 0) + 1
        if self.status.phase_counts[name] == 1:  # the launcher must know its deadline before anything can block
            self.watchdog.send_progress()
        if self._fault_injector is not None:
            self._fault_injector.at(name, self.status.phase_counts[name])

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run's networks."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def kv_store(self) -> KeyValueStore:
        """A mailbox for the calling thread."""
        return self._local_mailbox if self._store is None else TorchStore(self._store.clone())  # type: ignore[attr-defined]

    def _start_sum(self, name: str, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Handle:
        """Begin to sum a tensor over processes, in place; the optimizer's way to do so while backward runs."""
        self.bytes_reduced[name, tensor.nbytes] += 1
        if self.size == 1:
            return CompletedHandle()
        if tensor.is_cuda and self._over_host:
            return TrackedHandle(self.collective_log, name, _OverHost(tensor, operation))
        return TrackedHandle(
            self.collective_log, name, dist.all_reduce(tensor, operation, async_op=True), on_device=tensor.is_cuda
        )

    def _all_reduce(self, name: str, tensor: Tensor, operation: Any) -> None:
        self._forbid_inside_lane()
        with self.phase("reduce"):
            self._start_sum(name, tensor, operation).wait()

    def _forbid_inside_lane(self) -> None:
        if self._inside_lane:
            raise RuntimeError(
                "a collective was called inside iter_lanes or a loss, where processes may stand at different lanes.\n"
                "Collect what is to be shared, and share it after the loop."
            )


class Phase:
    """A stretch of work under a name. A class, because a rollout enters hundreds: generators cost twice as much."""

    __slots__ = ("_name", "_runtime")

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime, self._name = runtime, name

    def __enter__(self) -> None:
        runtime = self._runtime
        runtime.fault_point(self._name)
        runtime.status.progress += 1
        self._turn()
        runtime.status.phases.append(self._name)
        if runtime._phase_note is not None and len(runtime.status.phases) == 1:
            runtime._phase_note[:] = self._name.ljust(places.PHASE_BYTES)[: places.PHASE_BYTES].encode()

    def __exit__(self, *_: object) -> None:
        self._turn()
        self._runtime.status.progress += 1
        self._runtime.status.phases.pop()

    def _turn(self) -> None:
        """Give the time since the last turn to the innermost phase."""
        phases = self._runtime.status.phases
        self._runtime.timer.switch(phases[-1] if phases else None)


class _OverHost:
    """A reduction of a CUDA tensor by way of a copy on the host."""

    def __init__(self, tensor: Tensor, operation: Any) -> None:
        self._tensor, self._copy = tensor, tensor.to("cpu")
        self._work = dist.all_reduce(self._copy, operation, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._copy)


def _abandon_group() -> None:
    """Leave the other processes after a failure, within a few seconds.

    Destroying the group waits for collectives that were launched, which may wait for a process that is gone.
    """
    thread = threading.Thread(target=_abort_group, name="abort process group", daemon=True)
    thread.start()
    thread.join(3.0)


def _abort_group() -> None:
    with suppress(Exception):  # the failure that led here is the one to report
        dist.distributed_c10d._abort_process_group()


def half_precision(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype networks are autocast to; None for plain fp32."""
    if precision == "amp":
        # GPUs before Ampere emulate bf16, slower than fp32.
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if native or device.type == "cpu" else "fp16"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
