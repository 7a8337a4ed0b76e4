"""Faults on emulated GPUs, where `wait()` of a collective returns immediately: hang reports, restarts, first causes."""

import os
import sys

import pytest
import torch

import emulated_cuda
from helpers.multiprocess import command, together
from helpers.tiny_recipes import hash_of
from lockstep.config import RunConfig
from lockstep.distributed import Runtime

LOCKSTEP = [sys.executable, "-m", "lockstep"]
RECIPE = """
import os, sys, time
import lockstep.recipes.gym_ppo as base
import torch
from lockstep.algorithms.ppo import PPO
from lockstep.metrics import Metrics
from lockstep.distributed import DistributedOptimizer
from lockstep.tasks.gym.env import GymEnvs

class Faulty(base.GymPPO): ...

HERE = os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
"""
SKIP_A_COLLECTIVE = """
step = DistributedOptimizer.step

def skip_an_update(self, *arguments, **options):
    if HERE and self.updates == 20:
        self.updates += 1
        return Metrics()
    return step(self, *arguments, **options)

DistributedOptimizer.step = skip_an_update
"""
BLOCK_IN_AN_ENVIRONMENT = """
step, calls = GymEnvs.step, []

def block_in_an_environment(self, action):
    calls.append(1)
    if HERE and len(calls) == 40:
        time.sleep(3600)
    return step(self, action)

GymEnvs.step = block_in_an_environment
"""
ABORTED_BY_NCCL = """
update = PPO.update

def aborted_by_nccl(self, clock):
    if HERE and clock.iteration == 2:
        sys.modules["emulated_cuda_device"].abort_as_nccl(1)
        time.sleep(60)
    return update(self, clock)

PPO.update = aborted_by_nccl
"""
FAIL_BESIDE_A_COLLECTIVE = """
update = PPO.update

def fail_beside_a_collective(self, clock):
    if HERE and clock.iteration == 2:
        self.runtime._start_sum("nobody joins this", torch.ones(1, device="cuda"))
        raise ValueError("this is the first cause")
    return update(self, clock)

PPO.update = fail_beside_a_collective
"""


@pytest.fixture
def train(tmp_path):
    """Train a recipe with a fault on two emulated GPUs, with one restart; the command's outcome."""

    def run(fault, *words, **settings):
        (tmp_path / "faulty.py").write_text(RECIPE + fault)
        line = [*LOCKSTEP, "train", tmp_path / "faulty.py", "--smoke", "--procs", "2", "--max-restarts", "1"]
        line += [
            "run.device=cuda",
            "run.reduction=fast",
            f"run.runs_dir={tmp_path}",
            "run.name=run",
            "run.collective_timeout=9",
            "run.total_samples=1024",
            "run.save_every=256",
            "run.eval_every=none",
            *words,
        ]
        # Without Python's own fault handler: Lockstep's writes to a file that the launcher reads.
        return command(line, environment=emulated_cuda.environment(2, PYTHONFAULTHANDLER="", **settings))

    return run


@pytest.mark.parametrize(
    ("fault", "function"),
    [(BLOCK_IN_AN_ENVIRONMENT, "block_in_an_environment"), (SKIP_A_COLLECTIVE, "skip_an_update")],
)
def test_hang_report_names_process_phase_collective_and_line(tmp_path, train, fault, function):
    ended = train(fault)
    assert ended.code == 0, ended.output
    report = (tmp_path / "run" / "hang.txt").read_text()
    assert "process 1 on " in report
    assert "collective" in report
    assert "phase " in report
    assert f"in {function}" in report or "ppo.py:" in report
    assert "timed out after 9 s (run.collective_timeout)" in report
    assert "flight recorder of gloo" in report
    assert "flight recorder of NCCL" in report
    assert '"profiling_name": "nccl:ALLREDUCE"' in report
    assert "Starting again from the last checkpoint" in ended.output
    # A warning while waiting, then the abort.
    assert ended.output.index("collective") < ended.output.index("Aborting the run")


def test_stopped_process_is_reported_and_the_run_restarts(tmp_path, train):
    ended = train("", LOCKSTEP_INJECT_FAULT="1:learn:2:SIGSTOP")
    assert ended.code == 0, ended.output
    report = (tmp_path / "run" / "hang.txt").read_text()
    assert "process 1 on " in report
    assert "it has sent no heartbeat for some seconds" in report
    assert "SIGKILL" not in ended.output  # the launcher's own kill is not reported as a cause
    assert "Starting again from the last checkpoint" in ended.output


def test_abort_by_nccl_is_a_machine_fault_and_restarts(tmp_path, train):
    undisturbed = train("", "run.reduction=exact", "run.name=undisturbed")
    assert undisturbed.code == 0, undisturbed.output
    ended = train(ABORTED_BY_NCCL, "run.reduction=exact")
    assert ended.code == 0, ended.output
    assert "process 1 of 2 failed first: NCCL ended it" in ended.output
    assert "Starting again from the last checkpoint" in ended.output
    assert hash_of(tmp_path / "run") == hash_of(tmp_path / "undisturbed")


def test_first_cause_is_reported_although_process_group_exit_blocks(train):
    ended = train(FAIL_BESIDE_A_COLLECTIVE)
    assert ended.code == 1
    assert "process 1 of 2 failed first: ValueError: this is the first cause" in ended.output
    assert "in fail_beside_a_collective" in ended.output


# -- time --------------------------------------------------------------------------------------------------------------


def time_split():
    """Return seconds by phase for work that is launched in one phase and waited for in the next."""
    runtime = Runtime.single_process(RunConfig(), "cuda:0")
    with runtime.phase("learn"):
        torch.cuda._sleep(300_000_000)
    with runtime.phase("collect"):
        torch.zeros(1, device="cuda").item()
    torch.cuda.synchronize()  # unfinished device work would be counted in the next interval
    return runtime.timer.take()


def test_device_time_counts_for_the_phase_that_launched_it():
    seconds = together(time_split, 1, environment={"EMULATED_GPUS": "1"})[0]
    assert seconds["learn"] >= 0.3
    assert seconds["learn"] > seconds["collect"]


def waiting_time():
    """Return the seconds that a process waited for the other one, whose device is slower before each reduction."""
    with Runtime.start(RunConfig(device="cuda")) as runtime:
        for _ in range(5):
            if runtime.rank == 1:
                torch.cuda._sleep(100_000_000)
            runtime.all_reduce_sum(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        runtime.collective_log.now()
        return runtime.collective_log.waited


def test_wait_for_a_slow_device_is_counted_on_other_ranks():
    fast, slow = together(waiting_time, 2, environment={"EMULATED_GPUS": "2"})
    assert fast >= 0.4
    assert fast > 2 * slow


def pending():
    """Return the collective that the watchdog sees while the device waits for a late process."""
    import time

    with Runtime.start(RunConfig(device="cuda")) as runtime:
        if runtime.rank == 1:
            time.sleep(2.0)
        runtime.all_reduce_sum(torch.ones(1, device="cuda"))
        seen = [runtime.collective_log.now()]
        time.sleep(0.5)
        seen.append(runtime.collective_log.now())
        torch.cuda.synchronize()
        seen.append(runtime.collective_log.now())
        return [None if wait is None else [wait.number, wait.name, wait.since is not None, wait.line] for wait in seen]


def test_pending_collective_of_the_device_is_known_while_host_continues():
    (first, later, last), _ = together(pending, 2, environment={"EMULATED_GPUS": "2"})
    assert first[:2] == later[:2] == [1, "sum"]
    assert later[2] is True
    assert f"{os.path.basename(__file__)}:" in later[3]
    assert last is None
