"""The dump of an update: one directory per optimizer step, as `UpdateTrace` writes it. Read and described."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.checkpoint import format as form
from lockstep.checkpoint.tensorfile import read_tensor_file
from lockstep.config import ConfigError
from lockstep.protocols import StateDict

LANES, STATES = "lanes-*.safetensors", "states-*.safetensors"
_GRADIENT, _LOSS = ".gradient.", ".loss."


@dataclass(frozen=True)
class DumpedStep:
    """One optimizer step of an update."""

    path: Path
    iteration: int
    update: int
    loss: str
    """Name of the loss function."""
    where: str
    """Position in the iteration, such as the epoch and the minibatch."""

    def lanes(self) -> StateDict:
        """Return batch, loss and gradient of every lane."""
        return _read_all(self.path, LANES)

    def states(self) -> StateDict:
        """Return the state of every lane: environments and what the algorithm keeps of them."""
        return _read_all(self.path, STATES)

    def agent(self) -> StateDict:
        """Return networks, optimizers and normalizers before the update."""
        return read_tensor_file(self.path / form.SHARED, None)


def read_dump(directory: Path) -> list[DumpedStep]:
    """Return the steps of a dumped update in order. Raises ConfigError if there are none."""
    steps = []
    for path in sorted(directory.glob("*-*/"), key=lambda path: int(path.name.partition("-")[0])):
        names = json.loads(next(path.glob("lanes-*.json")).read_text())
        steps.append(DumpedStep(path, names["iteration"], names["update"], names["loss"], names["where"]))
    if not steps:
        raise ConfigError("the replay ended before this update.", "Use --update with a smaller number.")
    return steps


def describe_step(step: DumpedStep) -> str:
    """Return a line about a step: the loss summed over all lanes, and the norm of the summed gradient."""
    tensors = step.lanes()
    loss = sum(float(x) for name, x in tensors.items() if name.endswith(f"{_LOSS}loss"))
    sums: StateDict = {}
    for name, tensor in tensors.items():
        _, found, parameter = name.partition(_GRADIENT)
        if found:
            sums[parameter] = sums.get(parameter, torch.zeros((), dtype=torch.float64)) + tensor.double()
    norm = torch.stack([x.square().sum() for x in sums.values()]).sum().sqrt().item() if sums else 0.0
    bad = sorted(name for name, x in tensors.items() if x.is_floating_point() and not x.isfinite().all())
    found = f", not finite: {', '.join(bad[:3])}" if bad else ""
    place = f" ({step.where})" if step.where else ""
    return f"{step.loss}{place}: loss {loss:.6g}, gradient norm {norm:.6g}, summed over samples{found}"


def _read_all(directory: Path, pattern: str) -> StateDict:
    tensors: StateDict = {}
    for path in sorted(directory.glob(pattern)):
        tensors |= read_tensor_file(path, None)
    return tensors
