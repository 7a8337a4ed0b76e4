"""Digest of every tensor of every recipe at every iteration, to show that a refactoring changes no number.

    python benchmarks/digests.py record before.jsonl                  train every recipe (smoke setting, exact mode)
    python benchmarks/digests.py compare before.jsonl after.jsonl     exit code 1 if any digest differs
    python benchmarks/digests.py compare before.jsonl after.jsonl --renamed renamed.json

A digest covers dtype, shape and bytes, not the name, so that a renamed tensor keeps its digest. `renamed.json` maps
patterns of old names to new ones, as `re.sub` takes them: {"^algo\\.memory\\.": "algo.recurrent."}.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = ["run.reduction=exact", "run.log_tensor_digests=true", "run.record_video=false", "run.name=digests"]


def record(output: Path, recipes: list[str], procs: int) -> int:
    """Train the recipes and write one line for each recipe and iteration."""
    from lockstep.registry import RECIPES

    with output.open("w", encoding="utf-8") as file:
        for recipe in recipes or sorted(RECIPES):
            with tempfile.TemporaryDirectory() as runs:
                words = ["train", recipe, "--smoke", "--procs", str(procs), f"run.runs_dir={runs}", *SETTINGS]
                subprocess.run([sys.executable, "-m", "lockstep", *words], check=True, stdout=subprocess.DEVNULL)
                lines = (Path(runs) / "digests" / "digests.jsonl").read_text(encoding="utf-8").splitlines()
            for line in map(json.loads, lines):
                row = {"recipe": recipe, "iteration": line["iteration"], "digests": line["digests"]}
                file.write(json.dumps(row) + "\n")
            print(f"{recipe}: {len(lines)} iterations, {len(line['digests'])} tensors", flush=True)
    return 0


def compare(before: Path, after: Path, renamed: dict[str, str]) -> int:
    """Print, for each recipe, how many digests are equal, and the first that is not."""
    old, new = _read(before, renamed), _read(after, {})
    different = 0
    for recipe in sorted({key[0] for key in old | new}):
        equal, first = 0, ""
        for key in sorted(key for key in old | new if key[0] == recipe):
            ours, theirs = old.get(key, {}), new.get(key, {})
            for name in sorted(ours | theirs):
                if ours.get(name) == theirs.get(name):
                    equal += 1
                else:
                    different += 1
                    first = first or f", first difference: iteration {key[1]}, {name}"
        print(f"{recipe}: {equal} digests are equal{first}")
    print("All digests are equal." if not different else f"{different} digests differ.")
    return min(different, 1)


def _read(path: Path, renamed: dict[str, str]) -> dict[tuple[str, int], dict[str, str]]:
    found = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        digests = {}
        for name, digest in line["digests"].items():
            for pattern, replacement in renamed.items():
                name = re.sub(pattern, replacement, name)
            digests[name] = digest
        found[line["recipe"], line["iteration"]] = digests
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("output", type=Path)
    recording.add_argument("recipes", nargs="*")
    recording.add_argument("--procs", type=int, default=1)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renamed", type=Path)
    given = parser.parse_args()
    if given.command == "record":
        return record(given.output, given.recipes, given.procs)
    return compare(given.before, given.after, json.loads(given.renamed.read_text()) if given.renamed else {})


if __name__ == "__main__":
    sys.exit(main())
