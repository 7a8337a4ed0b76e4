"""Lines of json that a run leaves behind, and how to read them: no torch needed."""

import json
from pathlib import Path
from typing import Any

CONFIG, METRICS, DIGESTS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "digests.jsonl", "checkpoints"
STATUS, PRESENCE = "status.json", "presence"


def append_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a jsonl file; one that a kill cut in half is passed over."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def last_values(path: Path) -> dict[str, Any]:
    """The newest value of everything that was logged."""
    values: dict[str, Any] = {}
    for line in read_lines(path):
        values |= line
    return values


def cut_lines(path: Path, samples: int) -> None:
    """Drop the lines beyond a number of samples: what a killed run wrote after its last checkpoint."""
    lines = read_lines(path)
    kept = [line for line in lines if line.get("samples", 0) <= samples]
    if path.exists() and (len(kept) < len(lines) or not path.read_text().endswith("\n")):
        beside = path.with_name(f".{path.name}.partial")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        beside.replace(path)  # in one step: a kill must not take the lines that are to stay
