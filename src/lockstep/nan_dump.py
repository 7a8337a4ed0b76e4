"""Dump of a run that stopped at non-finite values: the agent before them, the inputs, and a report."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.base import Algorithm, VecEnv
from lockstep.checkpoint import format as form
from lockstep.checkpoint.snapshot import snapshot_shared
from lockstep.clock import TrainState
from lockstep.distributed import NonFiniteError, Runtime
from lockstep.protocols import StateDict

NONFINITE_DUMP, REPORT = "nonfinite_dump", "report.txt"


@contextmanager
def dump_on_nonfinite(
    path: Path, algorithm: Algorithm, task: VecEnv, clock: TrainState, runtime: Runtime
) -> Iterator[None]:
    """Wrap an iteration. If it produces non-finite values, dump the inputs and name the dump in the error."""
    try:
        yield
    except NonFiniteError as error:
        directory = path / NONFINITE_DUMP / str(clock.samples)
        agent = snapshot_shared(algorithm, task) if runtime.is_main else {}
        note = _dump(directory, str(error), agent, error.tensors, runtime)
        raise NonFiniteError(f"{error}\n{note}", error.tensors) from None


def _dump(directory: Path, message: str, agent: StateDict, inputs: StateDict, runtime: Runtime) -> str:
    """Write the dump of every process and wait for all, because a launcher kills the rest once one has exited."""
    inputs_path = directory / form.lane_file(runtime.lanes.local)

    def write() -> None:
        form.write_tensors(inputs_path, {name: x.detach().to("cpu", copy=True) for name, x in inputs.items()})
        if runtime.is_main:
            form.write_tensors(directory / form.SHARED, agent)
            form.replace_text(directory / REPORT, _report(directory, message, inputs_path))

    failures = [runtime.run_on_main(lambda: _attempt(lambda: _recreate(directory)))]
    if failures == [""]:
        failures = runtime.all_gather_json(_attempt(write))
    reasons = [f"process {process}: {reason}" for process, reason in enumerate(failures) if reason]
    if reasons:
        return f"The inputs could not be dumped to {directory} ({'; '.join(reasons)})."
    return f"The inputs are dumped to {directory}. Its {REPORT} says how to read them."


def _attempt(work: Callable[[], None]) -> str:
    """Return why some work failed, or an empty string. Never raise, because other processes wait for the result."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _recreate(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # left by an earlier attempt, perhaps with other processes
    directory.mkdir(parents=True)


def _report(directory: Path, message: str, inputs_path: Path) -> str:
    return f"""{message}

In this directory:
  {form.SHARED}  the agent, its optimizer and its normalizers, before the non-finite values occurred
  lanes-FIRST-LAST.safetensors  the inputs of the process that hosts these lanes: a rollout [step, environment, ...]
    with environments in lane order, or a minibatch [sample, ...] in lane order
Lanes, environments and steps count from 0. To read the files:

    from safetensors.torch import load_file
    agent = load_file({str(directory / form.SHARED)!r})
    numbers = load_file({str(inputs_path)!r})
"""
