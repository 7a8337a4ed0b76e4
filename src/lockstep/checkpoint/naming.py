"""Names of checkpoints and generations. This module does not import torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{1,18})-g(\d{1,9})", re.ASCII)
_GENERATION = re.compile(r"attempt-(\d{1,9})\.json", re.ASCII)


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Name of a checkpoint: its global samples and the generation that wrote it."""

    samples: int
    generation: int

    def __str__(self) -> str:
        return f"{self.samples:012d}-g{self.generation:04d}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


def generation_file(directory: Path, generation: int) -> Path:
    """Return the path of a generation's claim: host, pid and job of the start, and the checkpoint it resumes from."""
    return directory / f"attempt-{generation:04d}.json"


def started_at(directory: Path) -> float | None:
    """Return the time of a run's first start, in seconds since the epoch; None without its claim file."""
    try:
        return generation_file(directory, 1).stat().st_mtime
    except OSError:
        return None


def generations(names: Iterable[str]) -> list[int]:
    """Return the generations whose claim files are among these names, unsorted."""
    return [int(match[1]) for match in map(_GENERATION.fullmatch, names) if match]
