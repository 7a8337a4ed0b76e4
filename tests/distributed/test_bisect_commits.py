"""`lockstep bisect` between two commits of a user's recipe, trained on different numbers of processes."""

import re
import subprocess
import sys

import pytest

from helpers.flipped_recipe import ITERATION, write_recipe
from helpers.multiprocess import command

pytestmark = pytest.mark.distributed

KEPT = 10
"""Iterations between checkpoints that are kept."""
LOCKSTEP = [sys.executable, "-m", "lockstep"]


def git(directory, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *words], cwd=directory, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    ("iterations", "flip", "keep"),
    [
        pytest.param(20, 14, KEPT * ITERATION, id="short"),
        pytest.param(200, 37, KEPT * ITERATION, id="checkpoints", marks=pytest.mark.slow),
        pytest.param(200, 37, None, id="settings", marks=pytest.mark.slow),
    ],
)
def test_commit_that_changes_one_bit_is_found(tmp_path, iterations, flip, keep):
    head = tmp_path / "head"
    head.mkdir()
    git(head, "init", "--initial-branch=main")
    for changed in (None, flip):
        write_recipe(head / "recipe.py", iterations, flip=changed, keep=keep)
        git(head, "add", "recipe.py")
        git(head, "commit", "--message=recipe")
    git(head, "worktree", "add", "../base", "main~1", "--detach")
    for name, procs in (("base", "1"), ("head", "2")):
        words = ["train", f"../{name}/recipe.py", "--procs", procs, f"run.name={name}"]
        ended = command([*LOCKSTEP, *words], directory=head)
        assert ended.code == 0, ended.output
    ended = command([*LOCKSTEP, "bisect", "runs/base", "runs/head"], directory=head)
    assert ended.code == 1, ended.output
    told = " ".join(ended.output.split())
    begin = flip // KEPT * KEPT * ITERATION if keep else 0
    assert f"Training both again from {begin:,} samples" in told
    assert f"Iteration {flip} is the first after which tensors differ" in told
    assert f"Update {2 * flip - 1}, in iteration {flip}, is the first that gets different inputs" in told
    assert re.match(r"\d{4}\.batch\.(return|advantage) by up to", told.partition("tensors differ lane-")[2]), told
    same = command([*LOCKSTEP, "bisect", "runs/base", "runs/base"], directory=head)
    assert same.code == 0, same.output
