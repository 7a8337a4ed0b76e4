"""SIGKILL at every file operation that changes files of a fork: its parent is unchanged, and it is whole or absent."""

import hashlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from file_operations import Operations

from helpers.multiprocess import together
from helpers.recorder import ITERATION, Recording, record
from helpers.tiny_recipes import hash_of
from lockstep.config import apply_overrides
from lockstep.forking import create_fork

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
CHANGING = {"os.mkdir", "os.link", "os.rename", "os.rmdir", "os.remove", "fsync"}


class Changes(Operations):
    """The operations that change files: a fork reads many files, and a kill there leaves the same as the one before."""

    def audit(self, event, arguments):
        if event in ("os.listdir", "os.scandir"):
            return
        if event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            super().audit(event, arguments)


def contents(run):
    """Return everything in a directory that a fork must not change. The number of hard links may change."""
    return {
        str(path.relative_to(run)): (
            path.stat().st_mtime_ns,
            path.is_file() and hashlib.sha256(path.read_bytes()).digest(),
        )
        for path in run.rglob("*")
    }


def fork(directory, name, at=3 * ITERATION):
    before = apply_overrides(Recording(), {"run": {"runs_dir": directory, "name": "parent"}})
    return create_fork(Path(directory, "parent"), at, before, apply_overrides(before, {"run.name": name})).path


def kill_at_every_operation(directory):
    """Fork the run `parent` again and again, killed one operation later each time. Return operations and results."""
    operations = Changes(str(directory), 0)
    os.fsync = lambda descriptor: None  # a kill loses nothing that was written, and a busy disk is slow
    operations.wrap()
    operations.active = True
    whole = fork(directory, "whole")
    operations.active = False
    names, before, wanted = operations.names, contents(Path(directory, "parent")), hash_of(whole)
    results = []
    for at in range(1, len(names) + 1):
        for leftover in Path(directory).glob(".*"):  # the next fork would remove it, which takes operations
            shutil.rmtree(leftover)
        pid = os.fork()
        if pid == 0:
            operations.at, operations.names, operations.active = at, [], True
            fork(directory, "fork")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, names[at - 1]
        assert contents(Path(directory, "parent")) == before, names[at - 1]
        path = Path(directory, "fork")
        complete = path.is_dir() and any(path.iterdir())
        results.append(complete)
        if complete:
            assert hash_of(path) == wanted
            path.rename(Path(directory, f"fork-{at}"))
        elif path.is_dir():
            path.rmdir()  # reserved, and still empty. The next fork would use it with one operation less
    return names, results


def test_fork_killed_at_every_file_operation_leaves_parent_and_whole_forks(tmp_path):
    parent = record(tmp_path, "parent", total_samples=4 * ITERATION)
    names, results = together(kill_at_every_operation, 1, str(tmp_path))[0]
    assert set(names) >= CHANGING
    published = results.index(True)
    assert not any(results[:published])
    assert all(results[published:])
    assert names[published - 1] == "os.rename"
    # Each copied file, the small files and the directories are synced before the rename that publishes the fork.
    assert names[: published - 1].count("fsync") > 10
    # Files of killed forks are removed, and an empty directory is used again.
    (tmp_path / "fork").mkdir()
    assert fork(str(tmp_path), "fork") == tmp_path / "fork"
    assert [file for path in tmp_path.glob(".*") for file in path.iterdir()] == []
    resumed = next(tmp_path.glob("fork-*"))
    record(tmp_path, resumed.name, resume=True, total_samples=4 * ITERATION)
    assert hash_of(resumed) == hash_of(parent)
