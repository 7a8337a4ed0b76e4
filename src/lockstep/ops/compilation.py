"""How functions of tensors run: as written, compiled by torch, or recorded as CUDA graphs (`run.compile`).

A graph replays kernels at the addresses they had while it was recorded. A function that is recorded therefore gets what
changes between calls as inputs, which are copied to fixed addresses, or reads it from tensors that are changed in
place. It decides nothing by the values of tensors, and the next call overwrites what it returned.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lockstep.pytree import leaves, named_leaves, tree_map

COMPILE = "compile"
"""Phase in which a process compiles or records, while the others may wait for it."""
WARM_UPS = 3
"""Calls that run as written before one is recorded: libraries allocate their workspaces at first use."""
MAX_SIGNATURES = 8
"""Shapes of inputs that a function may be recorded for."""

Signature: TypeAlias = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Compilation:
    """What `run.compile` makes of a function."""

    def __init__(
        self,
        mode: str,
        device: torch.device,
        phase: Callable[[str], AbstractContextManager[Any]],
        notes: list[str],
    ) -> None:
        """`notes` takes sentences for the log."""
        self.device, self.phase, self.notes = device, phase, notes
        if mode == "graphs" and device.type != "cuda":
            self.note(f"run.compile is graphs, which needs CUDA: on {device.type} everything runs as written.")
            mode = "off"
        self.mode = mode
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The function as it is to be called; `name` is for the log."""
        if self.mode == "on":
            return _Compiled(function, self)
        return _Recorded(function, name, self) if self.mode == "graphs" else function

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that functions are warmed up and recorded on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream


class _Compiled:
    """A function compiled by torch, once for each shape of its inputs."""

    def __init__(self, function: Callable[..., Any], compilation: Compilation) -> None:
        # One graph for each shape: a symbolic one would be slower, and there are few.
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


class _Recorded:
    """A function recorded as a CUDA graph for each shape of its inputs, or run as written where that fails."""

    def __init__(self, function: Callable[..., Any], name: str, compilation: Compilation) -> None:
        self._function, self._name, self._compilation = function, name, compilation
        self._calls: dict[Signature, int] = {}
        self._graphs: dict[Signature, _Graph] = {}
        self._given_up = False

    def __call__(self, *inputs: Any) -> Any:
        if self._given_up:
            return self._function(*inputs)
        signature = _signature(inputs)
        graph = self._graphs.get(signature)
        if graph is None:
            calls = self._calls[signature] = self._calls.get(signature, 0) + 1
            if calls <= WARM_UPS:
                return self._warm_up(inputs)
            graph = self._record(signature, inputs)
            if graph is None:
                return self._function(*inputs)
        return graph.replay(inputs)

    def _warm_up(self, inputs: Any) -> Any:
        stream, here = self._compilation.stream, torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            result = self._function(*inputs)
        here.wait_stream(stream)
        return result

    def _record(self, signature: Signature, inputs: Any) -> "_Graph | None":
        if len(self._graphs) == MAX_SIGNATURES:
            self._give_up(f"its inputs have more than {MAX_SIGNATURES} different shapes")
            return None
        try:
            with self._compilation.phase(COMPILE):
                graph = _Graph(self._function, inputs, self._compilation)
        except RuntimeError as error:  # what CUDA and torch raise for what cannot be recorded
            self._give_up(str(error).strip().partition("\n")[0])
            return None
        self._graphs[signature] = graph
        return graph

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self._compilation.note(f"run.compile: {self._name} cannot be a CUDA graph and runs as written: {reason}.")


class _Graph:
    """One recorded call: its inputs at fixed addresses, its kernels, and what it returns."""

    def __init__(self, function: Callable[..., Any], inputs: Any, compilation: Compilation) -> None:
        self._inputs = tuple(tree_map(lambda x: x.detach().clone(), tree) for tree in inputs)
        self._places = [place for tree in self._inputs for place in leaves(tree)]
        self._graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads may use the device meanwhile, such as the one that writes checkpoints. With memory
        # of its own: in shared memory, a graph that is replayed could overwrite what a later one returned.
        with torch.cuda.graph(self._graph, stream=compilation.stream, capture_error_mode="thread_local"):
            self._outputs = function(*self._inputs)

    def replay(self, inputs: Any) -> Any:
        pairs = zip(self._places, (x for tree in inputs for x in leaves(tree)), strict=True)
        for _, same in groupby(sorted(pairs, key=_dtype_of), key=_dtype_of):  # one launch for each dtype
            places, values = zip(*same, strict=True)
            torch._foreach_copy_(list(places), [value.detach() for value in values])
        self._graph.replay()
        return tree_map(lambda x: x, self._outputs)  # the caller may change the dictionaries


def _signature(inputs: Any) -> Signature:
    return tuple((name, x.shape, x.dtype) for tree in inputs for name, x in named_leaves(tree).items())


def _dtype_of(pair: tuple[Tensor, Tensor]) -> str:
    return str(pair[0].dtype)
