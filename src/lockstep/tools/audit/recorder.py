"""Record every optimizer step of a script in one process, as fingerprints of tensors, and how the process ended.

The recorder uses torch's hooks around `Optimizer.step`, a hook on the gradient of each parameter, and a wrapper
around `Module.__call__`. They only read tensors. They do not communicate with other processes, so that they add no
collectives to those of the script.
"""

import hashlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from lockstep.distributed.consistency import fingerprints
from lockstep.launch.stack_traces import format_stack, own_stack, thread_stacks
from lockstep.tools.audit.tensor_names import ModuleNames, name_parameters

STEPS, END, STOP = "steps-{}.jsonl", "end-{}.json", "stop"
"""Files in the directory of an audit: steps of a process, its end record, and the request to stop."""


class StepRecorder:
    """Writes the optimizer steps of a script in one process to a file."""

    def __init__(self, directory: Path, rank: int, steps: int) -> None:
        self._directory, self._rank, self._limit = directory, rank, steps
        self._file = (directory / STEPS.format(rank)).open("w", buffering=1)
        self._modules = ModuleNames()
        self._optimizers: dict[int, int] = {}
        self._hooked_parameters: set[int] = set()
        self._step: dict[str, Any] = {}
        self._steps = self._depth = 0
        self._inputs: list[int] = []
        self._local_gradients: dict[str, int] = {}
        """By parameter: hash of all its gradients from backward since the last step, before any reduction."""
        self._wrapped_calls: Counter[int] = Counter()
        self._ending = threading.Lock()

    def install(self) -> None:
        """Register hooks for optimizers and modules, and start the thread that waits for the request to stop."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        call = nn.Module.__call__

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return call(module, *args, **kwargs)
            self._record_call(module, args, kwargs)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        nn.Module.__call__ = recorded_call  # type: ignore[method-assign]
        threading.Thread(target=self._await_stop, name="audit", daemon=True).start()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _record_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._wrapped_calls[id(module)] += 1
        if self._depth == 0 and torch.is_grad_enabled():  # training inputs only: acting runs without gradients
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._inputs += [_fingerprint(tensor) or 0 for tensor in tensors]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._modules.find_roots(sys._getframe(1))
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        parameters = name_parameters(optimizer, number, self._modules)
        self._step = {
            "optimizer": number,
            "time": time.time_ns(),
            "gradients": {name: _fingerprint(tensor.grad) for name, tensor in parameters.items()},
            "local": {name: self._local_gradients.pop(name) for name in parameters if name in self._local_gradients},
            "before": _fingerprints(parameters),
            "inputs": self._inputs,
            "random": random_states(),
            "wrappers": [
                {"name": name, "calls": self._wrapped_calls[id(wrapper)], "buffers": wrapper.will_sync_module_buffers()}
                for name, wrapper in self._modules.wrappers()
            ],
            "sharded": [name for name, tensor in parameters.items() if _is_sharded(tensor)],
        }
        self._inputs = []
        self._wrapped_calls.clear()
        for name, tensor in parameters.items():
            if id(tensor) not in self._hooked_parameters and tensor.requires_grad:
                self._hooked_parameters.add(id(tensor))
                tensor.register_hook(partial(self._record_gradient, name))

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        combined = self._local_gradients.get(name, 0) * 0x100000001B3 + (_fingerprint(gradient) or 0)
        self._local_gradients[name] = combined % 2**64

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = name_parameters(optimizer, self._step["optimizer"], self._modules)
        state = {
            f"{name}.{key}": value
            for name, tensor in parameters.items()
            for key, value in optimizer.state.get(tensor, {}).items()
            if isinstance(value, Tensor)
        }
        self._step |= {
            "after": _fingerprints(parameters),
            "state": _fingerprints(state),
            "buffers": _fingerprints(self._modules.buffers()),
        }
        self._file.write(json.dumps(self._step) + "\n")
        self._steps += 1
        if self._steps >= self._limit:
            self.end("reached", stack=format_stack(own_stack(sys._getframe(1))))
            threading.Event().wait()  # until the audit thread exits the process

    # -- end -----------------------------------------------------------------------------------------------------------

    def _await_stop(self) -> None:
        """Wait for the request to stop, record the stack of the main thread, which may be blocked, and exit."""
        while not (self._directory / STOP).exists():
            time.sleep(0.05)
        self.end("stood", stack=format_stack(thread_stacks().get(threading.main_thread().ident or 0, ())))
        os._exit(0)

    def end(self, how: str, *, error: str = "", stack: Sequence[str] = ()) -> None:
        """Write how this process ended. Only the first call has an effect."""
        path = self._directory / END.format(self._rank)
        with self._ending:
            if path.exists():
                return
            record = {"how": how, "error": error, "stack": list(stack), "collectives": collectives()}
            temporary = path.with_suffix(".partial")
            temporary.write_text(json.dumps(record))
            temporary.rename(path)


def collectives() -> list[dict[str, Any]]:
    """Return every collective of this process from torch's flight recorder, including those of DDP."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    return [
        {
            "group": entry["process_group"][0],
            "name": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "sizes": entry["input_sizes"],
            "time": entry["time_created_ns"],
        }
        for entry in json.loads(_dump_fr_trace_json()).get("entries", [])
        if not entry["is_p2p"]
    ]


def random_states() -> dict[str, str]:
    """Return hashes of the global random generator states that a script may use."""
    algorithm, keys, position, *_ = np.random.get_state()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": f"{algorithm} {position}".encode() + np.asarray(keys).tobytes(),
        "random": repr(random.getstate()).encode(),
    }
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in states.items()}


def _fingerprints(tensors: dict[str, Tensor]) -> dict[str, int | None]:
    return {name: _fingerprint(tensor) for name, tensor in tensors.items()}


def _fingerprint(tensor: Tensor | None) -> int | None:
    """Return a hash of a tensor's bits. None for a missing, meta or sharded tensor."""
    if tensor is None or _is_sharded(tensor) or tensor.is_meta:
        return None
    tensor = tensor.detach()
    if tensor.is_sparse:
        coalesced = tensor.coalesce()
        return hash((_fingerprint(coalesced.indices()), _fingerprint(coalesced.values())))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    with torch.no_grad():
        return int(fingerprints({"": tensor}).item())


def _is_sharded(tensor: Tensor) -> bool:
    """Return whether every process holds a different shard by design, as in FSDP and other model parallelism."""
    return isinstance(tensor, DTensor) or type(tensor).__name__ == "FlatParameter"
