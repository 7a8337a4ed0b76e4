#!/usr/bin/env python3
"""Check that the package, CITATION.cff and CHANGELOG.md name the same version, and that a tag names it, too.

`check_release.py` checks the files. `check_release.py v0.2.0` checks the files and the tag.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_problems(root: Path, tag: str | None = None) -> list[str]:
    """Return what disagrees, one sentence per problem."""
    version = _find(root / "src/lockstep/__init__.py", r'^__version__ = "(.+)"$')[0]
    cited = _find(root / "CITATION.cff", r"^version: (\S+)$")[0]
    cited_date = _find(root / "CITATION.cff", r"^date-released: (\S+)$")[0]
    newest, date = _find(root / "CHANGELOG.md", r"^## \[(\d[^\]]*)\] - (\d{4}-\d\d-\d\d)$")
    problems = []
    if cited != version:
        problems.append(f"CITATION.cff has version {cited}, but the package has {version}. Change `version`.")
    if newest != version:
        problems.append(
            f"The newest section of CHANGELOG.md is {newest}, but the package has {version}. "
            f"Add a section `## [{version}] - YYYY-MM-DD` below `## [Unreleased]`."
        )
    if cited_date != date:
        problems.append(f"CITATION.cff has date-released {cited_date}, but CHANGELOG.md has {date}. Use one date.")
    if tag is not None and tag != f"v{version}":
        problems.append(f"The tag is {tag}, but the package has version {version}. Tag it as v{version}.")
    return problems


def _find(path: Path, pattern: str) -> tuple[str, ...]:
    """Return the groups of the first line that matches."""
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    if not found:
        raise ValueError(f"{path.name} has no line that matches {pattern}")
    return found.groups()


if __name__ == "__main__":
    found = find_problems(ROOT, *sys.argv[1:2])
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    sys.exit(1 if found else 0)
