"""User-facing errors: each states the problem, the process, the cause and the fix."""

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
def test_out_of_memory_error_names_settings_to_lower(error):
    said = to_user_error(error, THIRD)
    assert isinstance(said, ConfigError)
    assert "process 2 of 4 ran out of memory: " in str(said)
    assert str(error) in str(said)
    assert "Lower algo.batch_size" in str(said)


def test_train_out_of_memory_exits_without_traceback(capsys, monkeypatch, tmp_path):
    def train(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("lockstep.training_loop.train", train)
    assert main(["train", "gym-ppo", "--smoke", f"run.runs_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert "process 0 of 1 ran out of memory: CUDA out of memory." in told
    assert "Traceback" not in told


def test_address_in_use_error_names_port(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29511")
    for error in (OSError(errno.EADDRINUSE, "Address already in use"), RuntimeError("failed, name: EADDRINUSE")):
        said = str(to_user_error(error, THIRD))
        assert "process 2 of 4 cannot listen on port 29511: another program uses it." in said
        assert "--standalone" in said


def test_rendezvous_endpoint_in_use_error_names_endpoint(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        meeting = ["--nnodes", "1:2", "--rdzv-endpoint", place, "--rdzv-id", "x"]
        assert main(["train", "gym-ppo", "--smoke", "--procs", "2", *meeting, f"run.runs_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert f"cannot connect to the rendezvous at {place}: another program uses that port" in told
    assert "use another port in --rdzv-endpoint" in told


def test_to_user_error_returns_other_errors_unchanged():
    error = ValueError("something else")
    assert to_user_error(error, THIRD) is error


def test_more_processes_than_gpus_are_rejected_with_usable_count(monkeypatch):
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
def test_missing_gpu_is_rejected_with_cause(monkeypatch, cuda, visible, fix, ask):
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


def test_several_processes_on_mps_log_warning(caplog):
    assert choose_device("mps", THIRD) == torch.device("mps")
    assert "4 processes share one MPS device: nothing is gained over --procs 1." in caplog.text


def test_missing_extra_error_shows_install_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("lockstep.nn.gnn.find_spec", lambda name: None)
    assert main(["train", "cricket-gnn", "--smoke", f"run.runs_dir={tmp_path}"]) == 2
    assert 'pip install "lockstep-rl[gnn]"' in capsys.readouterr().err
