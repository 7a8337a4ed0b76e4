"""Temporary directories of killed processes are removed at the next start; others are kept."""

import os
import subprocess
import sys
import tempfile

import pytest

from lockstep.io.temporary_directory import remove_leftovers, temporary_directory

HOLD = """
import sys
from lockstep.io.temporary_directory import temporary_directory
with temporary_directory("test") as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_temp_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_temporary_directory_of_killed_process_is_removed_at_next_start(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        left = tmp_path / os.path.basename(holder.stdout.readline().strip())
        remove_leftovers()
        assert left.is_dir()  # the owner is still running
        holder.kill()
        holder.wait()
    with temporary_directory() as mine:
        assert not left.exists()
        remove_leftovers()
        assert mine.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_remove_leftovers_keeps_links_and_directories_without_lock(tmp_path):
    (tmp_path / "lockstep-of-another-tool").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "lockstep-link").symlink_to(elsewhere)
    os.mkfifo(tmp_path / "lockstep-pipe")
    remove_leftovers()
    assert len(list(tmp_path.iterdir())) == 4
    assert (elsewhere / "lock").exists()
