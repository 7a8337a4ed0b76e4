"""Hang reports name the process that the others wait for, its phase and its source line."""

import os
import queue
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from run_helpers import LOCKSTEP, trial, words

from helpers.multiprocess import command, outcomes
from lockstep.algorithms.ppo import PPO
from lockstep.distributed import heartbeat
from lockstep.distributed.heartbeat import Heartbeat, HeartbeatFiles, HeartbeatStore
from lockstep.distributed.kv_store import KeyValueStore
from lockstep.tasks.gym.env import GymEnvs

pytestmark = pytest.mark.distributed

TIMEOUT = 9.0
"""Collective timeout in seconds: longer than the watchdog's warning interval, so that it reports before the abort."""


def sleep_in_the_environment(self, action):
    time.sleep(3600)


def wait_for_a_loader_that_is_dead(self, clock):
    queue.Queue().get()


PLANTS = {
    sleep_in_the_environment: (GymEnvs, "step", "env"),
    wait_for_a_loader_that_is_dead: (PPO, "collect", "collect"),
}


def hang(directory: str, process: int, plant: str) -> None:
    """Train with a fault injected into the second iteration of one process."""
    fault = globals()[plant]
    owner, method, _ = PLANTS[fault]
    whole, calls = getattr(owner, method), [0]

    def planted(self, argument):
        calls[0] += 1
        if calls[0] == (20 if method == "step" else 2):
            fault(self, argument)
        return whole(self, argument)

    if int(os.environ["RANK"]) == process:
        setattr(owner, method, planted)
    trial(directory, "run", {"run.collective_timeout": TIMEOUT}, False)


@pytest.mark.parametrize(
    ("plant", "process"),
    [("sleep_in_the_environment", 0), ("sleep_in_the_environment", 1), ("wait_for_a_loader_that_is_dead", 2)],
)
def test_hang_report_names_process_phase_and_line(tmp_path, plant, process):
    phase = PLANTS[globals()[plant]][2]
    ended = outcomes(watched, 3, str(tmp_path), process, plant)
    report = (tmp_path / "run" / "hang.txt").read_text()
    assert f"process {process} on " in report
    assert plant in report  # the function that blocks
    assert f"{Path(__file__).name}:" in report
    assert f"phase {phase}" in report
    assert f"timed out after {TIMEOUT:.0f} s (run.collective_timeout)" in report
    assert "flight recorder" in report
    told = "\n".join(outcome.output for outcome in ended)
    assert told.index("waited ") < told.index("Aborting the run")  # a warning while waiting, then the abort


def watched(directory: str, process: int, plant: str) -> None:
    """Like `hang`, but end the blocked process once the hang report is written."""

    def follow() -> None:
        while not (Path(directory) / "run" / "hang.txt").exists():
            time.sleep(0.2)
        time.sleep(2.0)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    hang(directory, process, plant)


BRANCH = """
import os
import lockstep.recipes.gym_ppo as base
from lockstep.algorithms.ppo import PPO

class Alone(base.GymPPO): ...

whole = PPO.update

def take_a_branch_alone(self, clock):
    if os.environ["RANK"] == "1" and clock.iteration == 1:
        self.runtime.all_reduce_any(a=True, b=False, c=True)
    return whole(self, clock)

PPO.update = take_a_branch_alone
"""


def test_collective_on_one_process_only_is_named_with_its_line(tmp_path):
    recipe = tmp_path / "alone.py"
    recipe.write_text(BRANCH)
    line = [
        *LOCKSTEP,
        "train",
        recipe,
        "--smoke",
        "--procs",
        "3",
        f"run.runs_dir={tmp_path}",
        "run.collective_timeout=9",
    ]
    ended = command(line, environment={"PYTHONFAULTHANDLER": ""})
    assert ended.code == 1
    # gloo aborts the process, or all processes wait, depending on which one arrives first.
    assert "process 1 of 3 failed first" in ended.output or "process 1 on" in ended.output, ended.output
    assert "in take_a_branch_alone" in ended.output, ended.output
    assert "phase learn" in ended.output or "phase reduce" in ended.output, ended.output
    assert "ranch around" in ended.output
    assert "Starting again" not in ended.output


@pytest.mark.parametrize("process", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stopped_process_is_reported_with_last_line_and_run_restarts(tmp_path, process):
    line = [
        *LOCKSTEP,
        *words(tmp_path, "run.collective_timeout=9", "run.total_samples=4096"),
        "--procs",
        "2",
        "--max-restarts",
        "1",
    ]
    ended = command(line, environment={"LOCKSTEP_INJECT_FAULT": f"{process}:learn:20:SIGSTOP"})
    assert ended.code == 0, ended.output
    report = (tmp_path / "run" / "hang.txt").read_text()
    assert f"process {process} on " in report
    assert "it has sent no heartbeat for some seconds (stopped, or its host is down); last seen in phase" in report
    assert ".py:" in report.partition("last seen in phase")[2].partition("\n")[0]
    assert "Starting again from the last checkpoint" in ended.output


# -- report text -----------------------------------------------------------------------------------------------------


def at(process: int, collective: int, waits: float | None, beat: int = 1, **more: object) -> Heartbeat:
    values = {"phase": "learn", "update": 7, "name": "gradient", "busy": 1.0, "stack": ["a.py:1 in f"]} | more
    return Heartbeat(
        process=process, host="h", pid=10 + process, sequence=beat, collective=collective, wait_seconds=waits, **values
    )


def test_describe_hang_separates_missing_from_waiting_processes():
    before = {p: at(p, 5, 1.0) for p in range(3)}
    now = {0: at(0, 5, 6.0, 2), 1: at(1, 4, None, 2, phase="env", stack=["env.py:9 in step"]), 2: at(2, 5, 6.0, 2)}
    text = heartbeat.describe_hang(before, now, 3, now[0])
    assert text.startswith("processes 0, 2 waited 6 s at collective 5 ('gradient', phase learn, update 7) for:")
    assert "process 1 on h (pid 11): it is in phase env, after collective 4 ('gradient'), at env.py:9 in step" in text


def test_describe_hang_reports_a_process_without_heartbeat():
    before = {p: at(p, 5, 1.0) for p in range(3)}
    now = {0: at(0, 5, 6.0, 2), 1: at(1, 5, 6.0, 2)}
    text = heartbeat.describe_hang(before, now | {2: before[2]}, 3, now[0])
    assert "process 2 on h (pid 12): it has sent no heartbeat for some seconds" in text
    assert "process 2: it has never sent a heartbeat" in heartbeat.describe_hang({}, now, 3, now[0])


def test_describe_hang_reports_different_collectives():
    now = {0: at(0, 5, 6.0), 1: at(1, 5, 6.0, name="max", stack=["b.py:2 in g"])}
    text = heartbeat.describe_hang({}, now, 2, now[0])
    assert "not at the same one" in text
    assert "process 1 on h (pid 11): 'max' (phase learn), at b.py:2 in g" in text
    assert "Synchronize the condition first" in text


def test_find_straggler_returns_the_process_with_most_busy_time():
    before = {p: at(p, 5, None, busy=10.0) for p in range(3)}
    now = {p: at(p, 9, None, busy=20.0 if p != 1 else 30.0) for p in range(3)}
    assert heartbeat.find_straggler(before, now) == (now[1], 2.0)
    even = {p: at(p, 9, None, busy=20.0 + p) for p in range(3)}
    assert heartbeat.find_straggler(before, even) is None
    assert heartbeat.find_straggler({}, now) is None


def test_heartbeat_read_skips_a_partial_file(tmp_path):
    files = HeartbeatFiles(tmp_path)
    files.write(at(0, 1, None))
    (tmp_path / "1.json").write_text('{"process": 1,')
    assert list(files.read()) == [0]
    HeartbeatFiles(tmp_path / "nowhere").write(at(0, 1, None))  # a failed write raises nothing


def test_heartbeats_in_the_store_are_read_when_all_have_sent_one(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    first, second = (HeartbeatStore(KeyValueStore(store), 2) for _ in range(2))
    first.write(at(0, 1, None))
    assert second.read() == {}
    second.write(at(1, 4, None))
    assert first.read() == second.read() == {0: at(0, 1, None), 1: at(1, 4, None)}
    assert not first.stop_requested()
    second.request_stop()
    assert first.stop_requested()
