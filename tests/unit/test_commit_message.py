"""The check of commit subjects: `area: imperative`, at most 72 characters, no period at the end."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "check_commit_message.py"
GOOD = "checkpoint: open store connections at startup"


def check_file(tmp_path, message):
    path = tmp_path / "COMMIT_EDITMSG"
    path.write_text(message)
    return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True)


@pytest.mark.parametrize(
    "subject",
    [
        GOOD,
        "tasks/dm_control: describe the Control Suite in plain English",
        "docs, ci: explain releases",
        "rng: seed streams by lane",
        "launch: pass the timeout: it was ignored",
        "ops: process rows in blocks",
        "ci: " + "x" * 68,
        "Merge branch 'hd' into work",
        'Revert "checkpoint: open store connections at startup"',
        "fixup! checkpoint: open store connections at startup",
    ],
)
def test_subject_with_area_and_imperative_passes(tmp_path, subject):
    checked = check_file(tmp_path, f"{subject}\n\nThe body may be longer than 72 characters. " + "word " * 30)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Open store connections at startup", "area: imperative"),
        ("wip", "area: imperative"),
        ("checkpoint:open store connections", "area: imperative"),
        ("Checkpoint: open store connections", "area: imperative"),
        ("checkpoint: ", "area: imperative"),
        ("", "area: imperative"),
        ("checkpoint: open store connections.", "ends with a period"),
        ("ci: " + "x" * 69, "has 73 characters"),
        ("checkpoint: Open store connections", "`Open` is not an imperative"),
        ("checkpoint: opened store connections", "`opened` is not an imperative"),
        ("checkpoint: opens store connections", "`opens` is not an imperative"),
        ("checkpoint: opening store connections", "`opening` is not an imperative"),
        ("tests: no command runs code", "`no` is not an imperative"),
    ],
)
def test_subject_violating_a_rule_fails_with_reason(tmp_path, subject, problem):
    checked = check_file(tmp_path, f"{subject}\n")
    assert checked.returncode == 1
    assert problem in checked.stderr


def test_message_file_comments_and_blank_lines_are_ignored(tmp_path):
    assert check_file(tmp_path, f"# On branch main.\n\n{GOOD}\n").returncode == 0


def test_range_checks_every_commit_except_merges(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def check_range(commits):
        command = [sys.executable, SCRIPT, "--range", commits]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    git("init", "--initial-branch=main")
    git("commit", "--allow-empty", "--message=Start")
    git("checkout", "-b", "change")
    git("commit", "--allow-empty", f"--message={GOOD}")
    git("checkout", "main")
    git("merge", "--no-ff", "--message=Take the change", "change")
    assert check_range("main~..main").returncode == 0
    git("commit", "--allow-empty", f"--message=fixup! {GOOD}")
    git("commit", "--allow-empty", "--message=docs: explained lanes")
    checked = check_range("main~2..main")
    assert checked.returncode == 1
    assert "fixup!" in checked.stderr
    assert "`explained` is not an imperative" in checked.stderr
