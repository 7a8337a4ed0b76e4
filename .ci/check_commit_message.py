#!/usr/bin/env python3
"""Check commit subjects: `area: imperative`, at most 72 characters, no period at the end.

`check_commit_message.py FILE` checks the message in FILE (commit-msg hook).
`check_commit_message.py --range A..B` checks every commit of a range, except merges.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_LENGTH = 72
AREA = r"[a-z0-9][a-z0-9_./-]*"
SUBJECT = re.compile(rf"{AREA}(?:, {AREA})*: (?P<verb>[^\s,;:.]+).*")
GENERATED = ("Merge ", 'Revert "')  # written by git
TEMPORARY = ("fixup! ", "squash! ", "amend! ")  # squashed before review

# A heuristic: the endings of "added", "adding" and "adds", and words that are no verbs.
OTHER_FORM = re.compile(r".+(?:ed|ing|[^s]s)")
IMPERATIVES = {"alias", "bias", "bring", "embed", "exceed", "feed", "focus", "need", "ping", "proceed", "seed", "speed"}
NO_VERBS = {"a", "all", "an", "another", "every", "it", "more", "new", "no", "of", "some", "the", "this"}


def find_problems(subject: str) -> list[str]:
    """Return what is wrong with a subject line, one sentence per problem."""
    if subject.startswith(GENERATED):
        return []
    problems = []
    if len(subject) > MAX_LENGTH:
        problems.append(f"It has {len(subject)} characters. Use at most {MAX_LENGTH}.")
    if subject.endswith("."):
        problems.append("It ends with a period. Remove the period.")
    match = SUBJECT.fullmatch(subject)
    if not match:
        return [*problems, "It does not have the form `area: imperative`, such as `docs: explain lanes`."]
    verb = match["verb"]
    if not verb[0].islower() or verb in NO_VERBS or (OTHER_FORM.fullmatch(verb) and verb not in IMPERATIVES):
        problems.append(f"`{verb}` is not an imperative in lower case. Write `add`, not `Add`, `added` or `adds`.")
    return problems


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--range"]:
        git = ["git", "log", "--no-merges", "--format=%s", *arguments[1:], "--"]
        subjects = subprocess.run(git, check=True, capture_output=True, text=True).stdout.splitlines()
    else:
        lines = [line for line in Path(arguments[0]).read_text().splitlines() if not line.startswith("#")]
        subjects = [line for line in lines if line][:1] or [""]
        subjects = [subject for subject in subjects if not subject.startswith(TEMPORARY)]
    problems = [f"{subject}\n  {problem}" for subject in subjects for problem in find_problems(subject)]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
