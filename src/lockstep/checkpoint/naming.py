"""The names of checkpoints and of generations: no torch needed to read them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{1,18})-g(\d{1,9})", re.ASCII)
_GENERATION = re.compile(r"attempt-(\d{1,9})\.json", re.ASCII)


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The name of a checkpoint: the clock's samples and the generation that wrote it."""

    samples: int
    generation: int

    def __str__(self) -> str:
        return f"{self.samples:012d}-g{self.generation:04d}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


def generation_file(directory: Path, generation: int) -> Path:
    """Where the start that claimed a generation says who it is, and what it goes on from."""
    return directory / f"attempt-{generation:04d}.json"


def generations(names: Iterable[str]) -> list[int]:
    """The generations that files of these names claim, in no order."""
    return [int(match[1]) for match in map(_GENERATION.fullmatch, names) if match]
