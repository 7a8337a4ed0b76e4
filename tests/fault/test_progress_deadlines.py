"""A run without progress is reported with the stacks of its threads and ends, wherever it blocks."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hosts import until
from run_helpers import LOCKSTEP

from helpers.multiprocess import SECONDS, command, outcomes
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS
from lockstep.launch.world import EXIT_PREEMPTED

pytestmark = pytest.mark.distributed

TIMEOUT = 4
RECIPE = """
import ctypes, os, sys, threading, time
import lockstep.recipes.gym_ppo as base
from lockstep.tasks.gym.env import GymEnvs

class Planted(base.GymPPO): ...

first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
rank = os.environ.get("RANK", "0")
step, fsync, calls = GymEnvs.step, os.fsync, [0]

def stand_still_in_a_sleep():
    time.sleep(3600)

def stand_still_with_the_interpreter_held():
    ctypes.PyDLL(None).sleep(3600)

def stand_still_in_fsync(descriptor):
    if calls[0] > 150 and first_start:
        time.sleep(3600)
    return fsync(descriptor)

def step_or_stand_still(self, action):
    calls[0] += 1
    if calls[0] == 100 and first_start and FAULT is not None and rank in RANKS:
        FAULT()
    return step(self, action)

GymEnvs.step = step_or_stand_still
"""


def planted(directory: Path, fault: str = "None", ranks: str = "0123", more: str = "") -> list[str]:
    """Return a command that trains with a fault in the environments of some processes."""
    text = RECIPE.replace("FAULT", fault).replace("RANKS", repr(ranks))
    (directory / "planted.py").write_text(text + more)
    words = ["train", str(directory / "planted.py"), "--smoke", f"run.runs_dir={directory}", "run.name=run"]
    return [*LOCKSTEP, *words, f"run.collective_timeout={TIMEOUT}", "run.save_every=512", "run.record_video=false"]


def test_blocked_single_process_run_ends_with_its_stacks(tmp_path):
    ended = command(planted(tmp_path, "stand_still_in_a_sleep"))
    assert ended.code == 1, ended.output
    assert f"The limit is {TIMEOUT} s (run.collective_timeout is {TIMEOUT})" in ended.output
    assert "in phase env" in ended.output
    assert "in stand_still_in_a_sleep" in ended.output
    assert "stand_still_in_a_sleep" in (tmp_path / "run" / "hang.txt").read_text()


@pytest.mark.parametrize("ranks", ["0", "01"], ids=["one of two", "all at once"])
def test_blocked_processes_are_reported_and_the_run_restarts(tmp_path, ranks):
    words = [*planted(tmp_path, "stand_still_in_a_sleep", ranks), "--procs", "2", "--max-restarts", "1"]
    ended = command(words)
    assert ended.code == 0, ended.output
    assert "in stand_still_in_a_sleep" in ended.output
    assert "Starting again from the last checkpoint" in ended.output


def test_launcher_reports_workers_whose_threads_cannot_run(tmp_path):
    words = [*planted(tmp_path, "stand_still_with_the_interpreter_held"), "--procs", "2", "--max-restarts", "1"]
    ended = command(words)
    assert ended.code == 0, ended.output
    # The last sample before the block may have been taken while a process was briefly inside a collective.
    assert "made no progress for" in ended.output or "waits in collective" in ended.output
    assert "so the launcher ends all processes" in ended.output
    assert "in stand_still_with_the_interpreter_held" in ended.output
    assert "Starting again from the last checkpoint" in ended.output


@pytest.mark.parametrize("processes", [1, 2])
def test_blocked_fsync_is_reported(tmp_path, processes):
    words = planted(tmp_path, more="\nos.fsync = stand_still_in_fsync\n")
    words += [
        "--procs",
        str(processes),
        "--max-restarts",
        "0",
        "run.total_samples=100000000",
        "run.eval_every=100000000",
    ]
    ended = command(words)
    assert ended.code == 1, ended.output
    assert "in stand_still_in_fsync" in ended.output


def test_stop_signal_is_handled_while_blocked(tmp_path):
    words = planted(tmp_path, "stand_still_in_a_sleep")
    words = [word for word in words if "run.collective_timeout" not in word]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: list((tmp_path / "run" / CHECKPOINTS).glob("0*")), "a first checkpoint")
        time.sleep(3)  # until it blocks
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == EXIT_PREEMPTED, said
    assert "saving at the end of this iteration, expected within " in said
    assert " or exiting without a checkpoint after " in said
    assert "of the stop request: exiting" in said


def join_alone() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(8)
        os._exit(0)
    with Runtime.start(RunConfig(lanes=2, collective_timeout=2.0)):
        pass


def test_runtime_start_times_out_if_a_process_does_not_join():
    first, _ = outcomes(join_alone, 2)
    assert (
        "CollectiveTimeoutError: process 0 of 2 waited 2 s (run.collective_timeout) for the others to start"
        in first.error
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_frozen_file_system_is_reported(tmp_path, processes):
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, disk], check=False).returncode:
        pytest.skip("no loop device here")
    words = [word.replace(f"run.runs_dir={tmp_path}", f"run.runs_dir={disk}") for word in planted(tmp_path)]
    words += ["--procs", str(processes), "run.total_samples=100000000", "run.eval_every=100000000"]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said)
        try:
            until(lambda: list((disk / "run" / CHECKPOINTS).glob("0*")), "a first checkpoint")
            subprocess.run(["fsfreeze", "-f", disk], check=True)
            try:
                until(lambda: "The limit is" in (tmp_path / "said").read_text(), "a report")
                if processes > 1:
                    assert process.wait(SECONDS) == 1  # the launcher ends although its workers cannot
            finally:
                subprocess.run(["fsfreeze", "-u", disk], check=True)
            assert process.wait(SECONDS) == 1
        finally:
            process.kill()
            process.wait()
            time.sleep(2)
            subprocess.run(["umount", "-l", disk], check=True)
