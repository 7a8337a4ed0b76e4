"""Per-process logs and resource usage."""

import torch

from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime, heartbeat
from lockstep.distributed.heartbeat import Heartbeat
from lockstep.distributed.resource_usage import MAX_REPORTED_PROCESSES, ResourceMonitor
from lockstep.loggers.process_log import ProcessLog


def opened(tmp_path):
    return ProcessLog(tmp_path, Runtime.single_process(RunConfig(lanes=4)))


def test_process_log_has_identity_progress_and_phase_times(tmp_path):
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
    assert last.endswith(" log closed")


def test_pending_messages_are_written_to_process_log(tmp_path):
    log = opened(tmp_path)
    log.runtime.pending_messages.append("An episode was restarted.")
    log.on_iteration_end(TrainState(total_samples=1), 0)
    assert log.runtime.pending_messages == []
    assert "An episode was restarted." in log.path.read_text()


def test_failure_is_logged_with_traceback(tmp_path):
    log = opened(tmp_path)
    try:
        raise ValueError("three is too many")
    except ValueError as error:
        log.failed(error)
    text = log.path.read_text()
    assert "Traceback" in text
    assert "ValueError: three is too many" in text


def test_unwritable_process_log_does_not_raise(tmp_path):
    (tmp_path / "logs").write_text("a file where a directory is to be")
    opened(tmp_path).message("unheard")


def beat(process, busy, age, use=None):
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


def test_utilization_is_busy_fraction_of_interval():
    before = {0: beat(0, 10.0, 12.0), 1: beat(1, 5.0, 12.0), 2: beat(2, 5.0, 12.0)}
    now = {0: beat(0, 19.0, 22.0), 1: beat(1, 10.0, 22.0), 2: beat(2, 5.0, 12.0), 3: beat(3, 1.0, 1.0)}
    # Process 2 has no new heartbeat, process 3 has no earlier one.
    assert heartbeat.utilization(before, now) == {0: 0.9, 1: 0.5}


def test_resource_monitor_uses_charted_names():
    found = ResourceMonitor(3, torch.device("cpu")).read()
    assert set(found) == {"process3_cpu_percent", "process3_memory_gb"}
    assert found["process3_memory_gb"] > 0.01
    assert ResourceMonitor(MAX_REPORTED_PROCESSES, torch.device("cpu")).read() == {}


def test_resource_monitor_reports_gpu_memory_and_utilization(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2e9)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    found = ResourceMonitor(1, torch.device("cuda")).read()
    assert found["gpu1_memory_allocated_gb"] == 2.0
    assert found["gpu1_util_percent"] == 87.0

    def missing(device):
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    assert "gpu1_util_percent" not in ResourceMonitor(1, torch.device("cuda")).read()
