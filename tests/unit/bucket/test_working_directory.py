"""Working directories: shared by the processes of a host, and removed when nobody uses them."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from lockstep.bucket.working_directory import CACHE, cache_directory, working_directory


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def die_inside(name):
    with working_directory(name) as path:
        (path / "file").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)


def test_last_user_removes_the_directory():
    with working_directory("run") as first:
        with working_directory("run") as second:
            assert first == second == cache_directory() / "run"
            (first / "file").write_text("x")
        assert (first / "file").exists()
    assert not first.exists()


def test_directory_of_a_killed_process_is_removed_by_the_next_start():
    killed = multiprocessing.get_context("spawn").Process(target=die_inside, args=("killed",))
    killed.start()
    killed.join(60)
    left = cache_directory() / "killed"
    assert (left / "file").exists()
    with working_directory("used"), working_directory("other"):
        assert sorted(path.name for path in cache_directory().iterdir()) == ["other", "used"]


def test_file_of_a_user_in_the_cache_is_kept():
    cache_directory().mkdir()
    (cache_directory() / "notes").mkdir()
    with working_directory("run"):
        pass
    assert (cache_directory() / "notes").exists()


def test_default_is_the_cache_of_the_user(monkeypatch):
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/lockstep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "lockstep"
