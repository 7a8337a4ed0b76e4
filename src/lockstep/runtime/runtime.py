"""Runtime: the one object through which a process knows of the others.

Everything here is the identity when there is one process. Algorithms get it injected: they sum, agree and go lane by
lane, and have no reason to know which process they are on.

Shapes: L local lanes, N samples a lane, K columns of a table. A batch is [L x N, ...], lane after lane.
"""

import json
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config import ConfigError, RunConfig, with_lanes
from lockstep.lanes import Lanes, deal
from lockstep.metrics import Metrics, widen
from lockstep.parent import die_with_launcher
from lockstep.protocols import State
from lockstep.runtime import place as places
from lockstep.runtime import pooling, strike, sync
from lockstep.runtime.compilation import Compilation
from lockstep.runtime.failures import in_words, record_failure
from lockstep.runtime.handles import Ledger, Noted, Nothing, Waiting
from lockstep.runtime.hosts import join_store, loopback
from lockstep.runtime.kernel_compilation import share_compilation
from lockstep.runtime.phase_timer import DeviceTimer, HostTimer, PhaseTimer
from lockstep.runtime.place import Place
from lockstep.runtime.private_store import sealed_sockets
from lockstep.runtime.store import LocalMailbox, Mailbox, StoreMailbox, heartbeat, wait_while_beating
from lockstep.runtime.watchdog import COMPILE_TIMEOUT, Watchdog
from lockstep.transfer import download
from lockstep.trees import Tree, first_leaf, tree_map


class Runtime:
    """The processes of a run, seen from one of them."""

    def __init__(
        self,
        run: RunConfig,
        place: Place,
        device: torch.device,
        store: dist.Store | None = None,
        hosting: range | None = None,
    ) -> None:
        """`run.lanes` must be settled; `hosting` are the lanes that live here, by default this process's share."""
        self.rank, self.size, self.job = place.rank, place.size, place.job
        self.device = device
        self.exact = run.reduction == "exact"
        self.nonfinite = run.nonfinite
        self.half = half_precision(run.precision, device)
        self.wire = torch.bfloat16 if run.wire == "bf16" else None
        self.bucket_bytes = int(run.bucket_mb * 2**20)
        lanes = run.lanes or 0
        self.lanes = Lanes(lanes, hosting or deal(lanes, place.size)[place.rank], run.seed)
        self.interrupted = False
        """Whether this process knows of a request to stop; the loop agrees on it at the end of an iteration."""
        self.ledger = Ledger()
        self.update = 0
        """The update this process is at."""
        self.started = time.monotonic()
        self.timer: PhaseTimer = DeviceTimer() if device.type == "cuda" else HostTimer()
        """Seconds by phase; a phase inside another counts for itself alone."""
        self.passed: dict[str, int] = {}
        """How often this process came by each phase."""
        self.sent: Counter[tuple[str, int]] = Counter()
        """Reductions by name and bytes since somebody last emptied it; also on one process, where nothing is sent."""
        self.notes: list[str] = []
        """Sentences for the log, until it has taken them."""
        self.compilation = Compilation(run.compile, device, self.phase, self.notes)
        self.halted: Tensor | None = None
        """On a device, 1.0 once a step that stops the run was skipped there: all steps that follow are skipped, too."""
        self._timeout = run.timeout
        self._store = store
        self._local_mailbox = LocalMailbox()
        self._phases: list[str] = []
        self.progress = 0
        """Grows with everything that this process gets done; the watchdog ends a process in which it stands still."""
        self._phase_note: mmap.mmap | None = None
        """Where the outermost of them is written, for whoever asks after a crash."""
        self._strike = strike.read(place)
        self._over_host = False
        """Whether CUDA tensors are reduced by way of the host, because processes share a GPU."""
        self._inside_lane = False
        self._main_calls = 0
        self.watchdog = Watchdog(self, run.timeout, run.max_hours)

    @classmethod
    @contextmanager
    def start(cls, run: RunConfig) -> Iterator["Runtime"]:
        """Join the other processes of this run; leave them when the block ends."""
        place = Place.from_environment()
        if place.started:
            die_with_launcher()
            places.leave_stack_on_crash(place)
            share_compilation()
        device = places.choose_device(run.device, place, run.share_gpu)
        places.set_arithmetic(run, place)
        run = with_lanes(run, place.size)
        store, backend = None, ""
        if place.size > 1:
            if place.local_size == place.size:
                os.environ.update(loopback())
            # The watchdog ends a run at the timeout, with a report; the backend's own comes only if that fails.
            timeout = timedelta(seconds=15.0 + max(run.timeout, 0.0 if run.compile == "off" else COMPILE_TIMEOUT))
            store = dist.PrefixStore("lockstep", join_store(place, run.timeout))
            shared = places.shared_gpus(store, place, device)
            if shared and not run.share_gpu:
                places.refuse_shared(shared)
            backend = places.choose_backend(device, bool(shared))
            bound = device if "nccl" in backend else None
            with sealed_sockets(backend):
                dist.init_process_group(
                    backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout, device_id=bound
                )
        places.note_backend(place, backend)
        runtime = cls(run, place, device, store)
        runtime._over_host = device.type == "cuda" and "nccl" not in backend
        runtime._phase_note = places.open_phase_note(place)
        try:
            with runtime.watchdog.watching():
                yield runtime
        except BaseException as error:
            # Before the group is left, which may take forever: the launcher must learn of the first cause.
            record_failure(in_words(error, place) if isinstance(error, Exception) else error)
            if backend:
                _abandon_group()
            raise
        if backend:
            dist.destroy_process_group()

    @classmethod
    def alone(cls, run: RunConfig, device: str = "cpu", hosting: range | None = None) -> "Runtime":
        """A runtime for plain Python: one process, no process group, whatever the environment says."""
        return cls(with_lanes(run, 1), Place(), torch.device(device), hosting=hosting)

    @property
    def main(self) -> bool:
        """Whether this process is the one that logs, prints and saves."""
        return self.rank == 0

    # -- numbers that become the same everywhere ---------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, in place."""
        self._all_reduce("sum", tensor, dist.ReduceOp.SUM)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum over processes, in place."""
        self._all_reduce("max", tensor, dist.ReduceOp.MAX)
        return tensor

    def pool(self, table: Tensor) -> Tensor:
        """The sum over all lanes of the run of a table [L, K], [K] float64 on the host.

        Rounded once, so the same bits however many processes. Waits for the device that the table is on.
        """
        self._forbid_inside_lane()
        with self.phase("reduce"):
            rows = widen(table.detach()).cpu().double().numpy()
            if self.size == 1:
                self.sent["pool", pooling.size(rows)] += 1
                sums = pooling.sum_here(rows)
            else:
                limbs = torch.from_numpy(pooling.as_limbs(rows))
                self._start_sum("pool", limbs).wait()
                sums = pooling.from_limbs(limbs.numpy())
            return torch.tensor(sums, dtype=torch.float64)

    def agree(self, **flags: bool) -> dict[str, bool]:
        """Each flag, true if it is true on any process."""
        self.watchdog.note_agreement()
        votes = torch.tensor([int(flag) for flag in flags.values()])
        return dict(zip(flags, self.max(votes).bool().tolist(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """One plain (JSON) value from every process, in order."""
        self._forbid_inside_lane()
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        text = json.dumps(value).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(text)
        width = int(self.sum(lengths).max())
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        self.ledger.wait(self.ledger.begin("gather"), "gather", lambda: dist.all_gather(everybody, mine))
        pairs = zip(everybody, lengths.tolist(), strict=True)
        return [json.loads(bytes(text[:length].tolist())) for text, length in pairs]

    def from_main(self, work: Callable[[], Any]) -> Any:
        """Let the main process do something alone; everybody gets its plain (JSON) result, or its error.

        It may take as long as it likes: the others wait at the store, not in a collective that would time out.
        """
        self._forbid_inside_lane()
        if self.size == 1:
            return json.loads(json.dumps(work()))
        self._main_calls += 1
        number = self.ledger.begin("from_main")
        key, beat = f"main/{self._main_calls}", f"main/{self._main_calls}/beat"
        if self.main:
            with heartbeat(self.mailbox(), beat, self._timeout):
                try:
                    text = json.dumps({"result": work()})
                except Exception as error:
                    self.mailbox().post(key, json.dumps({"error": str(error), "kind": type(error).__name__}))
                    raise
            self.mailbox().post(key, text)
            return json.loads(text)["result"]  # as the others read it: tuples are lists now, and keys are words
        silence = f"the main process has said nothing for {self._timeout:.0f} s while it worked alone"
        text = self.ledger.wait(
            number,
            "from_main",
            lambda: wait_while_beating(self.mailbox(), key, beat, self._timeout, silence, self.watchdog.note_progress),
        )
        answer = json.loads(text)
        if "error" in answer:
            kinds = {kind.__name__: kind for kind in (ConfigError, FileExistsError, FileNotFoundError, ValueError)}
            raise kinds.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["result"]

    def reduce(self, metrics: Metrics) -> dict[str, tuple[float, float]]:
        """Sums and counts over the whole run, by name."""
        pairs = metrics.agreed
        tables = download([*pairs.values(), *metrics.by_lane.values()])  # one transfer for all of them
        pairs = dict(zip(pairs, tables, strict=False))
        if metrics.by_lane:
            table = torch.cat(tables[len(pairs) :], dim=1)  # [L, 2 x names]
            pairs |= dict(zip(metrics.by_lane, self.pool(table).view(-1, 2), strict=True))
        if not pairs:
            return {}
        rows = torch.stack(list(pairs.values())).tolist()
        return {name: (total, count) for name, (total, count) in zip(pairs, rows, strict=True)}

    def in_sync(self, state: State, where: str) -> None:
        """Compare fingerprints of shared tensors over all processes; stop, naming tensor and process, if any differ."""
        self._forbid_inside_lane()
        if self.size == 1:
            self.sent["max", sync.size(state)] += 1
            return
        with self.phase("check"):
            mine = sync.fingerprints(state)
            if not sync.all_equal(mine, self.max):
                raise sync.OutOfSync(sync.report(self.gather(mine.tolist()), list(state), where))

    # -- lane by lane --------------------------------------------------------------------------------------------------

    def by_lane(self, batch: Tree) -> Iterator[Tree]:
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
        """Apply a function to the parts `by_lane` yields and put the results together again, [L x N, ...]."""
        outputs = [function(part) for part in self.by_lane(batch)]
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

    def pass_through(self, name: str) -> None:
        """Note that this process came by here; a scripted kill may strike."""
        self.passed[name] = self.passed.get(name, 0) + 1
        if self.passed[name] == 1:  # the launcher must know its deadline before anything can block
            self.watchdog.send_progress()
        if self._strike is not None:
            self._strike.at(name, self.passed[name])

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the run's networks."""
        if self.half is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.half)

    def mailbox(self) -> Mailbox:
        """A mailbox for the calling thread."""
        return self._local_mailbox if self._store is None else StoreMailbox(self._store.clone())  # type: ignore[attr-defined]

    def _start_sum(self, name: str, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Waiting:
        """Begin to sum a tensor over processes, in place; the optimizer's way to do so while backward runs."""
        self.sent[name, tensor.nbytes] += 1
        if self.size == 1:
            return Nothing()
        if tensor.is_cuda and self._over_host:
            return Noted(self.ledger, name, _OverHost(tensor, operation))
        return Noted(self.ledger, name, dist.all_reduce(tensor, operation, async_op=True), on_device=tensor.is_cuda)

    def _all_reduce(self, name: str, tensor: Tensor, operation: Any) -> None:
        self._forbid_inside_lane()
        with self.phase("reduce"):
            self._start_sum(name, tensor, operation).wait()

    def _forbid_inside_lane(self) -> None:
        if self._inside_lane:
            raise RuntimeError(
                "a collective was called inside by_lane or a loss, where processes may stand at different lanes.\n"
                "Collect what is to be shared, and share it after the loop."
            )


class Phase:
    """A stretch of work under a name. A class, because a rollout enters hundreds: generators cost twice as much."""

    __slots__ = ("_name", "_runtime")

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime, self._name = runtime, name

    def __enter__(self) -> None:
        runtime = self._runtime
        runtime.pass_through(self._name)
        runtime.progress += 1
        self._turn()
        runtime._phases.append(self._name)
        if runtime._phase_note is not None and len(runtime._phases) == 1:
            runtime._phase_note[:] = self._name.ljust(places.PHASE_BYTES)[: places.PHASE_BYTES].encode()

    def __exit__(self, *_: object) -> None:
        self._turn()
        self._runtime.progress += 1
        self._runtime._phases.pop()

    def _turn(self) -> None:
        """Give the time since the last turn to the innermost phase."""
        phases = self._runtime._phases
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
