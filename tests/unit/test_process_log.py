"""What each process writes of itself, and what it says of its machine."""

import torch

from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime, heartbeat
from lockstep.distributed.heartbeat import Heartbeat
from lockstep.distributed.resource_usage import MAX_REPORTED_PROCESSES, ResourceMonitor
from lockstep.loggers.process_log import ProcessLog


def opened(tmp_path):
    return ProcessLog(tmp_path, Runtime.single_process(RunConfig(lanes=4)))


def test_a_process_writes_who_it_is_and_where_its_time_went(tmp_path):
    log = opened(tmp_path)
    log.begin(TrainState(total_samples=100, samples=7), ["Restored from somewhere."])
    with log.runtime.phase("learn"):
        torch.ones(10).sum()
    log.write(TrainState(total_samples=100, samples=20, iteration=3), {})
    log.close()
    first, restored, line, last = (tmp_path / "logs" / "process-0.log").read_text().splitlines()
    assert "process 0 of 1 on " in first
    assert "lanes 0 to 3 of 4, from 7 samples" in first
    assert restored.endswith(" Restored from somewhere.")
    assert "20 samples, iteration 3; of " in line
    assert "learn " in line
    assert last.endswith(" left")


def test_notes_of_a_process_that_is_not_the_main_one_are_not_lost(tmp_path):
    log = opened(tmp_path)
    log.runtime.pending_messages.append("An episode was restarted.")
    log.on_iteration_end(TrainState(total_samples=1), 0)
    assert log.runtime.pending_messages == []
    assert "An episode was restarted." in log.path.read_text()


def test_a_failure_is_written_with_its_stack(tmp_path):
    log = opened(tmp_path)
    try:
        raise ValueError("three is too many")
    except ValueError as error:
        log.failed(error)
    text = log.path.read_text()
    assert "Traceback" in text
    assert "ValueError: three is too many" in text


def test_a_place_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "logs").write_text("a file where a directory is to be")
    opened(tmp_path).message("unheard")


def word(process, busy, age, use=None):
    common = {
        "host": "h",
        "pid": 1,
        "sequence": 1,
        "phase": "learn",
        "update": 1,
        "collective": 1,
        "name": "",
        "wait_seconds": None,
    }
    return Heartbeat(process=process, busy=busy, age=age, resources=use or {}, **common)


def test_a_load_is_the_part_of_the_time_in_which_a_process_waited_for_nobody():
    before = {0: word(0, 10.0, 12.0), 1: word(1, 5.0, 12.0), 2: word(2, 5.0, 12.0)}
    now = {0: word(0, 19.0, 22.0), 1: word(1, 10.0, 22.0), 2: word(2, 5.0, 12.0), 3: word(3, 1.0, 1.0)}
    assert heartbeat.utilization(before, now) == {0: 0.9, 1: 0.5}  # process 2 has said nothing since, and 3 is new


def test_vitals_are_told_under_the_names_that_are_charted():
    found = ResourceMonitor(3, torch.device("cpu")).read()
    assert set(found) == {"process3_cpu_percent", "process3_memory_gb"}
    assert found["process3_memory_gb"] > 0.01
    assert ResourceMonitor(MAX_REPORTED_PROCESSES, torch.device("cpu")).read() == {}


def test_a_gpu_is_told_with_its_use_and_its_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2e9)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    found = ResourceMonitor(1, torch.device("cuda")).read()
    assert found["gpu1_memory_allocated_gb"] == 2.0
    assert found["gpu1_util_percent"] == 87.0

    def missing(device):
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert "gpu1_util_percent" not in ResourceMonitor(1, torch.device("cuda")).read()
