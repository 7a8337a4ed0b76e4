"""The names of checkpoints and of generations: no torch needed to read them."""

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{1,18})-g(\d{1,9})", re.ASCII)
_GENERATION = re.compile(r"generation-(\d{1,9})\.json", re.ASCII)


@dataclass(frozen=True, order=True)
class Name:
    """The name of a checkpoint: the clock's samples and the generation that wrote it."""

    samples: int
    generation: int

    def __str__(self) -> str:
        return f"{self.samples:012d}-g{self.generation:04d}"

    @classmethod
    def parse(cls, text: str) -> "Name | None":
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


def generation_file(directory: Path, generation: int) -> Path:
    """Where the start that claimed a generation says who it is, and what it goes on from."""
    return directory / f"generation-{generation:04d}.json"


def generations(directory: Path) -> list[int]:
    """The generations that were claimed, in no order."""
    matches = (_GENERATION.fullmatch(path.name) for path in directory.glob("generation-*.json"))
    return [int(match[1]) for match in matches if match]
