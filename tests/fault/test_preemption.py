"""A run that receives a stop signal saves, exits, and resumes with the result of an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hosts import until
from run_helpers import LOCKSTEP, SETTINGS, errors, run, trial, words

from helpers.multiprocess import SECONDS, command, free_port, outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint.lineage import find
from lockstep.config import RunConfig, apply_overrides
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS, STATUS
from lockstep.launch.world import EXIT_PREEMPTED, STOP_SIGNALS
from lockstep.recipes.gym_ppo import GymPPO
from lockstep.tasks.gym.env import GymEnvs
from lockstep.training_loop import train

pytestmark = pytest.mark.distributed


def status(directory: Path) -> str:
    return str(json.loads((directory / "run" / STATUS).read_text())["state"])


@pytest.mark.parametrize(
    ("request_at", "processes", "resumed_on"),
    [
        ("1:collect:2:SIGTERM", 2, 1),
        ("0:learn:3:SIGUSR1", 2, 3),
        ("0:evaluate:1:SIGTERM", 2, 2),
        ("0:evaluate:2:SIGINT", 3, 1),  # the last evaluation, after all samples
        ("1:save:1:SIGTERM", 2, 1),
        ("0:publish:2:SIGTERM", 1, 2),
        ("0:collect:1:SIGTERM", 1, 2),
    ],
)
def test_resume_after_stop_signal_matches_undisturbed_run(tmp_path, undisturbed, request_at, processes, resumed_on):
    assert not errors(run(tmp_path, "run", processes, kill=request_at))
    assert status(tmp_path) == "preempted"
    assert not errors(run(tmp_path, "run", resumed_on, resume=True))
    assert status(tmp_path) == "finished"
    assert hash_of(tmp_path / "run") == undisturbed


def test_interrupted_evaluation_stays_pending(tmp_path):
    assert not errors(run(tmp_path, "run", 2, kill="0:evaluate:1:SIGTERM"))
    checkpoints = tmp_path / "run" / CHECKPOINTS
    values = json.loads((checkpoints / str(find(checkpoints)[0]) / "train_state.json").read_text())
    assert values["clock"]["eval_pending"]
    assert not values["clock"]["evaluation"]


def slow_trial(directory, sent):
    """Train with steps of a second, 8 in an iteration, and send SIGTERM at intervals from the first step on."""
    step = GymEnvs.step

    def ask() -> None:
        for seconds in sent:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask, daemon=True)

    def slowly(self, action):
        if asking.ident is None:
            asking.start()
        time.sleep(1.0)
        return step(self, action)

    GymEnvs.step = slowly
    trial(directory, "run", {}, False)


def test_stop_signals_in_quick_succession_count_as_one(tmp_path):
    (ended,) = outcomes(slow_trial, 1, str(tmp_path), [1.0, 1.0, 0.5])
    assert not ended.error
    assert status(tmp_path) == "preempted"


def test_second_stop_signal_later_ends_the_process_immediately(tmp_path):
    (ended,) = outcomes(slow_trial, 1, str(tmp_path), [1.0, 3.5])
    assert ended.error == f"ended by exit code {128 + signal.SIGTERM}"


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_at",
    [
        "1:collect:2:SIGTERM:launcher",
        pytest.param("1:evaluate:1:SIGINT:launcher", marks=pytest.mark.slow),
        pytest.param("0:save:2:SIGUSR1:launcher", marks=pytest.mark.slow),
        "1:learn:2:SIGTERM",
    ],
)
def test_train_command_exits_with_75_and_resume_matches_undisturbed_run(tmp_path, undisturbed, request_at):
    ended = command([*LOCKSTEP, *words(tmp_path), "--procs", "2"], environment={"LOCKSTEP_INJECT_FAULT": request_at})
    assert ended.code == EXIT_PREEMPTED, ended.output
    assert "saving at the end of this iteration" in ended.output
    assert f"resume   lockstep resume {tmp_path / 'run'}" in ended.output
    assert status(tmp_path) == "preempted"
    resumed = command([*LOCKSTEP, "resume", tmp_path / "run"])
    assert resumed.code == 0, resumed.output
    assert hash_of(tmp_path / "run") == undisturbed


def test_max_hours_preempts_and_resume_matches_undisturbed_run(tmp_path, undisturbed):
    ended = command([*LOCKSTEP, *words(tmp_path), "run.max_hours=0.0"])
    assert ended.code == EXIT_PREEMPTED, ended.output
    assert "run.max_hours is over" in ended.output
    resumed = command([*LOCKSTEP, "resume", tmp_path / "run", "run.max_hours=1"])
    assert resumed.code == 0, resumed.output
    assert hash_of(tmp_path / "run") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("request_at", ["1:learn:2:SIGTERM", "0:collect:2:SIGTERM:launcher"])
def test_torchrun_preemption_is_recorded_in_the_status_file(tmp_path, undisturbed, request_at):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lockstep"]
    command([*torchrun, *words(tmp_path)], environment={"LOCKSTEP_INJECT_FAULT": request_at})
    assert status(tmp_path) == "preempted"
    assert not errors(run(tmp_path, "run", 1, resume=True))
    assert hash_of(tmp_path / "run") == undisturbed


def test_workers_listen_on_loopback_only_and_exit_with_their_launcher(tmp_path):
    line = [*LOCKSTEP, *words(tmp_path, "run.total_samples=100000000"), "--procs", "2"]
    launcher = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: list((tmp_path / "run" / CHECKPOINTS).glob("0*")), "a first checkpoint")
        workers = psutil.Process(launcher.pid).children(recursive=True)
        assert len(workers) >= 2
        listeners = [conn for process in workers for conn in process.net_connections("tcp") if conn.status == "LISTEN"]
        assert listeners
        assert {conn.laddr.ip for conn in listeners} <= {"127.0.0.1", "::1"}
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(workers, timeout=SECONDS)
    assert not alive


def test_workers_being_started_exit_with_their_launcher(tmp_path):
    line = [*LOCKSTEP, *words(tmp_path, "run.total_samples=100000000"), "--procs", "2"]
    launcher = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline, workers = time.monotonic() + SECONDS, []
        while len(workers) < 3 and time.monotonic() < deadline:  # the fork server and two workers
            workers = psutil.Process(launcher.pid).children(recursive=True)
    finally:
        launcher.kill()  # as soon as they exist
        launcher.wait()
    assert len(workers) == 3
    _, alive = psutil.wait_procs(workers, timeout=SECONDS)
    assert not alive


def test_launcher_waiting_for_hosts_exits_on_stop_signal(tmp_path):
    meeting = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job"]
    launcher = subprocess.Popen([*LOCKSTEP, *words(tmp_path), *meeting], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: psutil.Process(launcher.pid).net_connections("tcp"), "a launcher that listens")
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate(timeout=SECONDS)
    finally:
        launcher.kill()
    assert launcher.returncode == EXIT_PREEMPTED
    assert "stop requested while no process was training" in said


def end_late(directory):
    """Run a training worker as the command line does, and send a stop signal after training has ended."""
    from lockstep.cli.workers import run_training_worker

    def work():
        result = trial_result(directory)
        os.kill(os.getpid(), signal.SIGUSR1)
        return result

    return run_training_worker(work)


def trial_result(directory):
    return train(apply_overrides(GymPPO(), SETTINGS | {"run.runs_dir": directory, "run.name": "run"}))


def test_stop_signal_after_the_run_ended_is_ignored(tmp_path):
    (ended,) = outcomes(end_late, 1, str(tmp_path))
    assert (ended.error, ended.value) == ("", 0)
    assert status(tmp_path) == "finished"


def end_beside_a_thread():
    """Send stop signals after a run, while a thread that the run started is alive: it may receive them instead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as a worker process does at startup
    with Runtime.start(RunConfig(lanes=1)):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    time.sleep(0.2)
    return "unharmed"


def test_stop_signal_to_a_leftover_thread_is_ignored():
    (ended,) = outcomes(end_beside_a_thread, 1)
    assert (ended.error, ended.value) == ("", "unharmed")


def test_prove_interrupt_ends_the_proof_without_a_verdict(tmp_path):
    line = [*LOCKSTEP, "prove", "gym-ppo", "--procs", "2", "3", "--output-dir", str(tmp_path)]
    proof = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: list(tmp_path.glob("procs-2/checkpoints/0*")), "a first checkpoint")
        proof.send_signal(signal.SIGINT)
        said, _ = proof.communicate(timeout=SECONDS)
    finally:
        proof.kill()
    assert proof.returncode == 130, said
    assert "agent" not in said  # no verdict, neither "One agent" nor "Not one agent"
    assert not (tmp_path / "procs-3").exists()
