"""Pipes, sockets, devices and directories in place of a run's files are reported; no command blocks on them."""

import contextlib
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from helpers.multiprocess import together
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.cli import main
from lockstep.io.safe_read import UnreadableFileError, open_regular, read_text
from lockstep.training_loop import train


def pipe(path):
    os.mkfifo(path)


def listening(path):
    here = os.getcwd()
    os.chdir(path.parent)  # a socket address is limited to 108 bytes
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)
    os.chdir(here)


def device(path):
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero; needs root


KINDS = {"pipe": pipe, "socket": listening, "directory": os.mkdir, "device": device}


@pytest.mark.parametrize("kind", KINDS)
def test_open_regular_rejects_special_files(tmp_path, kind):
    with contextlib.suppress(PermissionError):
        KINDS[kind](tmp_path / "a")
        with pytest.raises(UnreadableFileError, match="is not a file"):
            open_regular(tmp_path / "a")
        with pytest.raises(UnreadableFileError, match="is not a file"):
            read_text(tmp_path / "a", 100)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "b")


def every_command(run, scratch, kinds):
    """Replace each file of a run by each kind in turn, and run every command that reads it."""
    os.chdir(scratch)
    files = [path.relative_to(run) for path in Path(run).rglob("*") if path.is_file() and "events" not in path.name]
    wrong = {}
    for kind in kinds:
        for file in files:
            copy = Path(scratch) / "runs" / "run"
            shutil.copytree(run, copy)
            (copy / file).unlink()
            try:
                KINDS[kind](copy / file)
            except PermissionError:
                shutil.rmtree(copy.parent)
                continue
            for words in (["ls", "runs"], ["report", copy], ["eval", copy, "--episodes", "1"], ["resume", copy]):
                try:
                    code = main([str(word) for word in words])
                except BaseException as error:
                    code = f"{type(error).__name__}: {error}"
                if code not in (0, 2):
                    wrong[f"{words[0]} with a {kind} as {file}"] = code
                if words[0] == "resume" and kind != "directory" and code != 2:
                    wrong[f"resume with a {kind} as {file}"] = code
            shutil.rmtree(copy.parent)
    return wrong


@pytest.mark.parametrize("kinds", [["pipe"], pytest.param(["socket", "device", "directory"], marks=pytest.mark.slow)])
def test_commands_do_not_block_on_special_files_in_a_run(tmp_path, kinds):
    train(tiny(tmp_path, total_samples=ITERATION, eval_every=ITERATION, eval_episodes=1, log_tensor_digests=True))
    (tmp_path / "scratch").mkdir()
    assert together(every_command, 1, str(tmp_path / "run"), str(tmp_path / "scratch"), kinds) == [{}]
