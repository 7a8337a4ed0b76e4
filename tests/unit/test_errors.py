"""Errors a user meets: each says what, which process, why, and what mends it."""

import errno
import socket

import pytest
import torch

from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.launch.device import choose_device, require_gpus
from lockstep.launch.failures import to_user_error
from lockstep.launch.world import WorldInfo

THIRD = WorldInfo(rank=2, size=4, local_rank=2, local_size=4, launched=True)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("Unable to allocate 74.5 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_memory_that_ran_out_is_told_with_the_numbers_to_lower(error):
    said = to_user_error(error, THIRD)
    assert isinstance(said, ConfigError)
    assert "process 2 of 4 ran out of memory: " in str(said)
    assert str(error) in str(said)
    assert "Lower algo.batch_size" in str(said)


def test_a_run_that_is_out_of_memory_ends_with_a_sentence(capsys, monkeypatch, tmp_path):
    def train(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("lockstep.train.train", train)
    assert main(["train", "gym-ppo", "--smoke", f"run.runs_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert "process 0 of 1 ran out of memory: CUDA out of memory." in told
    assert "Traceback" not in told


def test_a_port_that_is_taken_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29511")
    for error in (OSError(errno.EADDRINUSE, "Address already in use"), RuntimeError("failed, name: EADDRINUSE")):
        said = str(to_user_error(error, THIRD))
        assert "process 2 of 4 cannot listen at port 29511, which another program holds." in said
        assert "--standalone" in said


def test_an_endpoint_that_another_program_holds_is_named(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        meeting = ["--nnodes", "1:2", "--rdzv-endpoint", place, "--rdzv-id", "x"]
        assert main(["train", "gym-ppo", "--smoke", "--procs", "2", *meeting, f"run.runs_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert f"hosts cannot meet at {place}: another program holds that port" in told
    assert "Choose another port" in told


def test_other_errors_are_left_as_they_are():
    error = ValueError("something else")
    assert to_user_error(error, THIRD) is error


def test_more_processes_than_gpus_are_refused_with_the_number_that_fits(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"4 processes need a GPU each, and 2 GPUs are visible on this machine.\nUse --procs 2"
    ):
        choose_device("auto", THIRD)


@pytest.mark.parametrize(
    ("cuda", "visible", "fix"),
    [
        (None, None, "This torch is built without CUDA: install a build with it"),
        ("13.0", None, "Check that nvidia-smi lists a GPU on this machine"),
        ("13.0", "1", "Check that nvidia-smi lists a GPU on this machine"),
        ("13.0", "-1", "CUDA_VISIBLE_DEVICES hides all GPUs: unset it"),
    ],
)
@pytest.mark.parametrize("ask", [lambda: choose_device("cuda", THIRD), lambda: require_gpus("cuda", 1, False)])
def test_missing_gpu_is_refused_with_its_cause(monkeypatch, cuda, visible, fix, ask):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as refusal:
        ask()
    assert "--run.device is cuda, and torch" in str(refusal.value)
    assert fix in str(refusal.value)
    assert "or use --run.device cpu" in str(refusal.value)


def test_several_processes_on_a_mac_are_told_that_nothing_is_gained(caplog):
    assert choose_device("mps", THIRD) == torch.device("mps")
    assert "4 processes share one MPS device: nothing is gained over --procs 1." in caplog.text


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lockstep.nn.gnn.find_spec", lambda name: None)
    assert main(["train", "cricket-gnn", "--smoke", f"run.runs_dir={tmp_path}"]) == 2
    assert 'pip install "lockstep-rl[gnn]"' in capsys.readouterr().err
