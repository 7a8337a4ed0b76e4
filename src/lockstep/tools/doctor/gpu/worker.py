"""Process of one step: calls the step's function and writes its findings to a file that the runner reads."""

import contextlib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.io.printable import write_text
from lockstep.tools.doctor.gpu.process import CommandResult, run

KIT = "LOCKSTEP_GPU_KIT"
"""Environment variable of a step: a JSON object with the arguments of `ResultRecord`."""


class Skip(Exception):
    """The step does not apply here. The message says why."""


class Failure(Exception):
    """The step found something wrong. The message says what."""


class ResultRecord:
    """Findings of a step so far, written to its file after every addition."""

    def __init__(self, result: str, gpus: int, quick: bool, scratch: str) -> None:
        self.gpus, self.quick, self.scratch = gpus, quick, Path(scratch)
        self.lanes = max(8, gpus)  # of all runs, so that results do not depend on the number of processes
        self.found: dict[str, Any] = {}
        self.failures: list[str] = []
        self._path = Path(result)

    def add(self, name: str, value: Any) -> None:
        """Add one finding under a name."""
        self.found[name] = value
        self.write("", "")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of the step whose failure does not keep later parts from running."""
        try:
            yield
        except Skip as reason:
            self.add(name, {"skipped": str(reason)})
        except Exception as error:
            self.failures.append(f"{name}: {describe(error)}")

    def write(self, result: str, reason: str) -> None:
        """Write everything found so far. An empty result means that the step has not ended."""
        temporary = self._path.with_suffix(".unfinished")
        temporary.write_text(json.dumps({"result": result, "reason": reason, "found": self.found}))
        temporary.replace(self._path)


def run_step(args: Sequence[str]) -> int:
    """Run the step whose module and function are the first of `args`; the others are its arguments."""
    target, *step_arguments = args
    record = ResultRecord(**json.loads(os.environ[KIT]))
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(f"lockstep.tools.doctor.gpu.{module}"), function)(record, *step_arguments)
    except Skip as reason:
        record.write("skipped", str(reason))
    except Exception as error:
        record.write("failed", "; ".join([*record.failures, describe(error)]))
    else:
        record.write("failed" if record.failures else "passed", "; ".join(record.failures))
    return 0


def describe(error: Exception) -> str:
    """Return an exception as one line of text. Print the traceback of an unexpected one."""
    text = " ".join(str(error).split())
    if isinstance(error, Failure):
        return text
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text}"[:500]


def lockstep(*args: Any, **variables: str) -> CommandResult:
    """Run `lockstep ARGS` with some environment variables. Its output goes to the step's output."""
    result = run([sys.executable, "-P", "-m", "lockstep", *map(str, args)], os.environ | variables)
    write_text(sys.stdout, f"$ lockstep {' '.join(map(str, args))}\n{result.output}\n")
    return result


def expect(result: CommandResult, what: str) -> None:
    """Raise Failure, with the last line of output, unless a command ended with exit code 0."""
    if result.problem:
        last_line = result.output.rpartition("\n")[2].strip()[:300]
        raise Failure(f"{what}: {result.problem}: {last_line or 'no output'}")
