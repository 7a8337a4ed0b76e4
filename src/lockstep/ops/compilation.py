"""Execution of tensor functions: eagerly, compiled by torch, or captured as CUDA graphs (`run.compile`).

A graph replays kernels at the memory addresses of its capture. Values that change between calls must therefore be
inputs, which are copied to fixed addresses, or tensors that are changed in place. A captured function must not branch
on the values of tensors, and each call overwrites the results of the last one.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lockstep.pytree import leaves, named_leaves, tree_map

COMPILE = "compile"
"""Phase in which a process compiles or captures, while others may wait for it."""
WARM_UPS = 3
"""Eager calls before the capture, because libraries allocate their workspaces at first use."""
MAX_SIGNATURES = 8
"""Maximum number of input shapes for which a function is captured."""

Signature: TypeAlias = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Compilation:
    """Wraps functions as set by `run.compile`."""

    def __init__(
        self,
        mode: str,
        device: torch.device,
        phase: Callable[[str], AbstractContextManager[Any]],
        notes: list[str],
    ) -> None:
        """Messages for the log are appended to `notes`."""
        self.device, self.phase, self.notes = device, phase, notes
        if mode == "graphs" and device.type != "cuda":
            self.note(f"run.compile is graphs, which needs CUDA: on {device.type}, functions run eagerly.")
            mode = "off"
        self.mode = mode

    def __call__(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function; `name` is for the log."""
        if self.mode == "on":
            return _CompiledFunction(function, self)
        return _CapturedFunction(function, name, self) if self.mode == "graphs" else function

    def note(self, message: str) -> None:
        if message not in self.notes:
            self.notes.append(message)

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """Stream for warm-up and capture."""
        return torch.cuda.Stream(self.device)


class _CompiledFunction:
    """A function compiled by torch, once per input shape."""

    def __init__(self, function: Callable[..., Any], compilation: Compilation) -> None:
        # Static shapes: there are few, and dynamic shapes would be slower.
        self._function = torch.compile(function, dynamic=False)
        self._compilation = compilation
        self._seen: set[Signature] = set()

    def __call__(self, *inputs: Any) -> Any:
        signature = _signature(inputs)
        if signature in self._seen:
            return self._function(*inputs)
        with self._compilation.phase(COMPILE):
            result = self._function(*inputs)
        self._seen.add(signature)
        return result


class _CapturedFunction:
    """A function captured as a CUDA graph per input shape. Runs eagerly if the capture fails."""

    def __init__(self, function: Callable[..., Any], name: str, compilation: Compilation) -> None:
        self._function, self._name, self._compilation = function, name, compilation
        self._calls: Counter[Signature] = Counter()
        self._graphs: dict[Signature, _Graph] = {}
        self._failed = False

    def __call__(self, *inputs: Any) -> Any:
        if self._failed:
            return self._function(*inputs)
        signature = _signature(inputs)
        graph = self._graphs.get(signature)
        if graph is None:
            self._calls[signature] += 1
            if self._calls[signature] <= WARM_UPS:
                return self._warm_up(inputs)
            graph = self._capture(signature, inputs)
        return self._function(*inputs) if graph is None else graph.replay(inputs)

    def _warm_up(self, inputs: Any) -> Any:
        stream, current = self._compilation.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = self._function(*inputs)
        current.wait_stream(stream)
        return result

    def _capture(self, signature: Signature, inputs: Any) -> "_Graph | None":
        reason = f"its inputs have more than {MAX_SIGNATURES} different shapes"
        if len(self._graphs) < MAX_SIGNATURES:
            try:
                with self._compilation.phase(COMPILE):
                    graph = self._graphs[signature] = _Graph(self._function, inputs, self._compilation)
                return graph
            except RuntimeError as error:  # CUDA and torch raise it for functions that cannot be captured
                reason = str(error).strip().partition("\n")[0]
        self._failed = True
        self._compilation.note(f"run.compile: {self._name} cannot be captured as a CUDA graph, runs eagerly: {reason}.")
        return None


class _Graph:
    """One captured call: inputs at fixed addresses, the CUDA graph, and outputs."""

    def __init__(self, function: Callable[..., Any], inputs: Any, compilation: Compilation) -> None:
        self._inputs = tuple(tree_map(lambda x: x.detach().clone(), tree) for tree in inputs)
        self._slots = [slot for tree in self._inputs for slot in leaves(tree)]
        self._graph = torch.cuda.CUDAGraph()
        # Thread-local, because other threads, such as the one that saves checkpoints, may use the device. With a
        # private memory pool: in a shared pool, replaying a graph could overwrite the outputs of another one.
        with torch.cuda.graph(self._graph, stream=compilation.stream, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: Any) -> Any:
        pairs = zip(self._slots, (x for tree in inputs for x in leaves(tree)), strict=True)
        for _, group in groupby(sorted(pairs, key=_dtype_of), key=_dtype_of):  # one launch per dtype
            slots, values = zip(*group, strict=True)
            torch._foreach_copy_(list(slots), [value.detach() for value in values])
        self._graph.replay()
        return tree_map(lambda x: x, self._outputs)  # new dictionaries, because the caller may change them


def _signature(inputs: Any) -> Signature:
    return tuple((name, x.shape, x.dtype) for tree in inputs for name, x in named_leaves(tree).items())


def _dtype_of(pair: tuple[Tensor, Tensor]) -> str:
    return str(pair[0].dtype)
