"""What is kept of a run that stopped at bad numbers: the agent before them, what they were met in, and a report."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint import format as form
from lockstep.checkpoint.snapshot import snapshot_shared
from lockstep.clock import TrainState
from lockstep.distributed import NonFiniteError, Runtime
from lockstep.protocols import Algorithm, StateDict, VecEnv

NONFINITE_DUMP, REPORT = "nonfinite_dump", "report.txt"


@contextmanager
def dump_on_nonfinite(
    path: Path, algorithm: Algorithm, task: VecEnv, clock: TrainState, runtime: Runtime
) -> Iterator[None]:
    """Around an iteration: should it stop at bad numbers, keep what led to them and say where, on every process."""
    try:
        yield
    except NonFiniteError as bad:
        directory = path / NONFINITE_DUMP / str(clock.samples)
        agent = snapshot_shared(algorithm, task) if runtime.is_main else {}
        raise NonFiniteError(f"{bad}\n{_keep(directory, str(bad), agent, bad.tensors, runtime)}", bad.tensors) from None


def _keep(directory: Path, sentence: str, agent: StateDict, evidence: StateDict, runtime: Runtime) -> str:
    """Write everybody's part, and wait until all have: a launcher ends the others as soon as one has left."""
    mine = directory / form.lane_file(runtime.lanes.local)

    def write() -> None:
        form.write_tensors(mine, {name: x.detach().to("cpu", copy=True) for name, x in evidence.items()})
        if runtime.is_main:
            form.write_tensors(directory / form.SHARED, agent)
            form.replace_text(directory / REPORT, _report(directory, sentence, mine))

    refused = [runtime.run_on_main(lambda: _attempt(lambda: _make(directory)))]
    if refused == [""]:
        refused = runtime.all_gather_json(_attempt(write))
    reasons = [f"process {process}: {reason}" for process, reason in enumerate(refused) if reason]
    if reasons:
        return f"What led to it could not be kept in {directory} ({'; '.join(reasons)})."
    return f"What led to it is kept in {directory}: its {REPORT} says how to look at it."


def _attempt(work: Callable[[], None]) -> str:
    """Why some work failed; nothing where it did not. Others wait for the answer, whatever went wrong."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _make(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # an earlier attempt's, perhaps of other processes
    directory.mkdir(parents=True)


def _report(directory: Path, sentence: str, example: Path) -> str:
    return f"""{sentence}

In this directory:
  {form.SHARED}  the agent, its optimizer and its normalisers, as they were before this happened
  lanes-FIRST-LAST.safetensors  what the process that hosts these lanes had in hand: a rollout, [step, environment,
    ...] with environments lane after lane, or a minibatch, [sample, ...], lane after lane
Lanes, environments and steps count from 0. To look at them:

    from safetensors.torch import load_file
    agent = load_file({str(directory / form.SHARED)!r})
    numbers = load_file({str(example)!r})
"""
