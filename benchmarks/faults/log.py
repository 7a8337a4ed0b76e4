"""Log of a campaign: a line for every fault, and a line with the hash for every run that has ended."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

Line = dict[str, Any]
WIDTH = 120
"""Characters in a line of the table's text."""


class CampaignLog:
    """Lines of a campaign. Faults of a run that has not ended are removed when the campaign starts again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.lines = read_log(path) if path is not None and path.exists() else []
        ended = [number for number, line in enumerate(self.lines) if "hash" in line]
        del self.lines[ended[-1] + 1 if ended else 0 :]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def faults(self) -> int:
        return sum("fault" in line for line in self.lines)

    @property
    def runs(self) -> int:
        return len(self.lines) - self.faults

    def add(self, line: Line) -> None:
        self.lines.append(line)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def write_table(directory: Path) -> Path:
    """Write all logs of a directory as two tables, by kind of fault and by recipe."""
    lines = [line for path in sorted(directory.glob("*.jsonl")) for line in read_log(path)]
    faults, runs = [line for line in lines if "fault" in line], [line for line in lines if "hash" in line]
    equal = sum(run["hash"] == run["undisturbed"] for run in runs)
    forks = sum(run["forks"] for run in runs)
    left = sum(bool(run["left"]) for run in runs)
    recovery = [line["recovered_after"] for line in faults]
    text = [
        "# Random faults",
        "",
        fill(
            f"{len(faults):,} faults in {len(runs)} runs and {forks} forks of them. {equal} of {len(runs)} runs, with "
            f"their forks, ended with the hash of the undisturbed run. {left} left processes, files or unreferenced "
            "objects.",
            WIDTH,
        ),
        "",
        fill(
            f"From a fault to the next checkpoint, it took {median(recovery):.1f} s (median), and {max(recovery):.1f} "
            "s at most. This includes the wait for a save that was due anyway.",
            WIDTH,
        ),
        "",
        "| fault | directory | bucket | median recovery (s) | longest (s) |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(_kind_row(kind, [line for line in faults if line["fault"] == kind]) for kind in _values(faults, "fault")),
        "",
        "| recipe | storage | faults | runs | forks | sweeps killed | hash |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
        *(
            _recipe_row(recipe, storage, lines)
            for recipe in _values(runs, "recipe")
            for storage in _values(runs, "storage")
            if any(run["recipe"] == recipe and run["storage"] == storage for run in runs)
        ),
        "",
        "Made by `python benchmarks/chaos.py --table` from the logs in this directory.",
    ]
    path = directory / "README.md"
    path.write_text("\n".join(text) + "\n")
    return path


def _values(lines: Iterable[Line], key: str) -> list[str]:
    return sorted({line[key] for line in lines})


def _kind_row(kind: str, faults: list[Line]) -> str:
    seconds = [line["recovered_after"] for line in faults]
    counts = [sum(line["storage"] == storage for line in faults) for storage in ("directory", "bucket")]
    return f"| {kind} | {counts[0]} | {counts[1]} | {median(seconds):.1f} | {max(seconds):.1f} |"


def _recipe_row(recipe: str, storage: str, lines: list[Line]) -> str:
    mine = [line for line in lines if line["recipe"] == recipe and line["storage"] == storage]
    runs = [line for line in mine if "hash" in line]
    hashes = sorted({run["hash"][:8] for run in runs})
    sweeps = sum(run.get("sweep_kills", 0) for run in runs)
    forks = sum(run["forks"] for run in runs)
    return (
        f"| {recipe} | {storage} | {len(mine) - len(runs)} | {len(runs)} | {forks} | {sweeps} | {', '.join(hashes)} |"
    )
