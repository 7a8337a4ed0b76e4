"""Where two runs were equal for the last time, and what a traced repetition of both shows after it.

A trace has the digests of every tensor after each iteration (`run.log_tensor_digests`), and of every update: of the
agent before it and of its batch. They are compared by name. Names begin with the lane, if a tensor belongs to one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import format as form
from lockstep.io.jsonl import iter_jsonl
from lockstep.protocols import StateDict
from lockstep.tools.replay.digests import Digests
from lockstep.tools.replay.starts import starts
from lockstep.tools.verify.comparison import differing_tensors
from lockstep.tools.verify.history import RunHistory, Segment

LANE = "lane-"
"""Beginning of the names of tensors that belong to a lane."""
Step = dict[str, Any]
"""A line of a trace: iteration, update, step, loss, where, agent and batch."""


class Start(NamedTuple):
    """Replays of two runs from the same state."""

    one: Segment
    other: Segment


@dataclass(frozen=True)
class Found:
    """The first difference between two traces."""

    iteration: int
    tensors: list[str]
    """Tensors that differ after this iteration."""
    update: int | None = None
    """The first update that differs. None: none does up to the end of the traces."""
    update_iteration: int = 0
    inputs_differ: bool = True
    """Whether what goes into this update differs. Otherwise it computes something else from the same."""


def common_start(one: RunHistory, other: RunHistory, samples: int) -> Start | None:
    """Return the newest state, at most `samples` samples, from which both runs can be replayed. None: there is none."""
    others = {segment.first: segment for segment in starts(other, samples)}
    for segment in starts(one, samples):
        match = others.get(segment.first)
        if match is None or (segment.path is None) != (match.path is None):
            continue
        if segment.path is None or match.path is None or equal_checkpoints(segment.path, match.path):
            return Start(segment, match)
    return None


def equal_checkpoints(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same tensors, also of replay."""
    return not differing_tensors(one, other) and _replay(one) == _replay(other)


def _replay(path: Path) -> list[str]:
    values = form.read_values(path)
    if not (rows := values.get("rows")):
        return []
    files = form.read_manifest(path)["files"]
    lanes = (form.read_rows(path, lane, files, rows) for lane in range(values["lanes"]))
    return [form.digest_tensor(name, tensor) for replay in lanes for name, tensor in sorted(replay.items())]


def read_steps(directory: Path) -> list[Step]:
    """Return the traced optimizer steps in order, with the digests of the lanes of all processes."""
    steps: dict[tuple[int, int], Step] = {}
    for path in sorted(directory.glob("lanes-*.jsonl")):
        for line in iter_jsonl(path):
            step = steps.setdefault((line["update"], line["step"]), {**line, "batch": {}})
            step["batch"] |= line["batch"]
    return [steps[key] for key in sorted(steps)]


def compare_traces(digests: tuple[Digests, Digests], steps: tuple[list[Step], list[Step]]) -> Found | None:
    """Compare the traces of two replays from the same state. None: they are equal."""
    one, other = digests
    changed = {
        one[samples]["iteration"]: _differing(one[samples].get("digests", {}), other[samples].get("digests", {}))
        for samples in sorted(one.keys() & other.keys())
    }
    changed = {iteration: names for iteration, names in changed.items() if names}
    agents = {iteration for iteration, names in changed.items() if any(not name.startswith(LANE) for name in names)}
    update = first_update(*steps, agents)
    if update is not None:
        changed.setdefault(update["iteration"], [])
    if not changed:
        return None
    first = min(changed)
    if update is None:
        return Found(first, changed[first])
    return Found(first, changed[first], update["update"], update["iteration"], update["inputs_differ"])


def first_update(one: list[Step], other: list[Step], agents: set[int]) -> Step | None:
    """Return the first step that differs between two traces, with `inputs_differ`. None: none does.

    `agents` are the iterations after which the agents differ.
    """
    previous: Step | None = None
    for first, second in zip(one, other, strict=False):
        if first["batch"] != second["batch"]:
            return first | {"inputs_differ": True}
        if first["agent"] != second["agent"]:
            # The step before it has changed the agent, unless that happened between their iterations.
            if previous is not None and (
                previous["iteration"] == first["iteration"] or previous["iteration"] in agents
            ):
                return previous | {"inputs_differ": False}
            return first | {"inputs_differ": True}
        previous = first
    if previous is not None and previous["iteration"] in agents:
        return previous | {"inputs_differ": False}
    return None


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def largest_differences(one: StateDict, other: StateDict) -> dict[str, float | None]:
    """Return the largest absolute difference of each tensor that differs. None: only one side has it, or the shape."""
    found: dict[str, float | None] = {}
    for name in sorted(one.keys() | other.keys()):
        first, second = one.get(name), other.get(name)
        if first is None or second is None or first.shape != second.shape:
            found[name] = None
        elif form.digest_tensor("", first) != form.digest_tensor("", second):
            found[name] = (first.double() - second.double()).abs().max().item()
    return found
