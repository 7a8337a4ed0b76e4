"""Results of a run as plain data, read from its run directory. No process of the run is involved."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.checkpoint.lineage import list_checkpoints
from lockstep.config import Recipe
from lockstep.inference import LoadedPolicy, load
from lockstep.io.jsonl import CHECKPOINTS, METRICS, iter_jsonl, parse_line, read_status

EVAL = "eval/"
"""Prefix of evaluation results in the log."""

Callback: TypeAlias = Callable[[dict[str, Any]], object]
"""Called with plain data in the process that called `lockstep.train` or `lockstep.resume`."""


@dataclass(frozen=True)
class Run:
    """A run directory: what `lockstep.train` returns. `lockstep.Run(path)` opens an existing one.

    Every property reads the files of the run again, so it also describes a run that another process trains.
    """

    path: Path
    """Absolute path of the run directory."""
    recipe: Recipe | None = field(default=None, repr=False, compare=False)
    """Recipe that was trained; None if the run was opened by its path."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).absolute())

    @property
    def status(self) -> str:
        """running, finished, preempted, failed or superseded."""
        return str(read_status(self.path).get("state", "unknown"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All entries of the log: `samples`, `iteration` and metrics by name."""
        return list(iter_jsonl(self.path / METRICS))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations in order: `samples` and results by name, without the prefix `eval/`."""
        return [_evaluation(line) for line in iter_jsonl(self.path / METRICS) if _is_evaluation(line)]

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the highest score; None before the first one."""
        return max(self.evaluations, key=_score, default=None)

    @property
    def checkpoints(self) -> list[Path]:
        """The published checkpoints, oldest first."""
        directory = self.path / CHECKPOINTS
        return sorted(directory / str(name) for name in list_checkpoints(directory)) if directory.is_dir() else []

    def load(self, at: int | None = None, device: str = "cpu", seed: int = 0) -> LoadedPolicy:
        """Load a policy of the run.

        Args:
            at: Samples of the checkpoint to load. None: the best checkpoint, or the newest if none was evaluated.
            device: Device of the policy.
            seed: Seed of `act(obs, deterministic=False)`.

        Returns:
            A policy with the methods `act` and `reset`.

        Raises:
            ConfigError: The directory contains no run or no such checkpoint.
        """
        return load(self.path, at, device, self.recipe, seed)


class RunEvents:
    """Calls back for every new entry of a run's log and every new checkpoint. `poll` reads what is new."""

    def __init__(
        self, path: Path, on_log: Callback | None, on_evaluation: Callback | None, on_checkpoint: Callback | None
    ) -> None:
        self.run = Run(path)
        self._on_log, self._on_evaluation, self._on_checkpoint = on_log, on_evaluation, on_checkpoint
        self._position = 0
        self._reported: set[tuple[Any, bool]] = set()
        # A resumed run has entries and checkpoints already.
        self._reported.update(map(_key, self._new_lines()))
        self._checkpoints = set(self.run.checkpoints)

    def poll(self) -> None:
        """Report what is new since the last call. A restart repeats entries, which are reported once."""
        for line in self._new_lines():
            if _key(line) not in self._reported:
                self._reported.add(_key(line))
                if _is_evaluation(line):
                    _call(self._on_evaluation, _evaluation(line))
                else:
                    _call(self._on_log, line)
        for path in self.run.checkpoints:
            if path not in self._checkpoints:
                self._checkpoints.add(path)
                _call(self._on_checkpoint, {"samples": int(path.name.partition("-")[0]), "path": path})

    def _new_lines(self) -> list[dict[str, Any]]:
        """Read the complete lines that were appended since the last call."""
        try:
            with (self.run.path / METRICS).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._position:  # a restart truncated the log to its checkpoint
                    self._position = 0
                file.seek(self._position)
                text = file.read(size - self._position)
        except OSError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        return [line for text in complete.splitlines() if (line := parse_line(text)) is not None]


def _score(line: Mapping[str, Any]) -> float:
    score = float(line.get("score", line.get("return_mean", -math.inf)))
    return -math.inf if math.isnan(score) else score


def _call(callback: Callback | None, data: dict[str, Any]) -> None:
    if callback is not None:
        callback(data)


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name.startswith(EVAL) for name in line)


def _evaluation(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(EVAL): value for name, value in line.items()}


def _key(line: Mapping[str, Any]) -> tuple[Any, bool]:
    return line.get("samples"), _is_evaluation(line)
