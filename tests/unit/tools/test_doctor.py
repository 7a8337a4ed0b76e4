"""lockstep doctor: injected problems are reported with a fix, healthy checks pass, bug reports are redacted."""

import os
import socket
import sys
from collections import namedtuple

import pytest

from lockstep.cli import main
from lockstep.tools.doctor import disk, gymnasium_packages, machine, network, rendering, smoke_test
from lockstep.tools.doctor.bug_report import without_names, write_bug_report
from lockstep.tools.doctor.environment import check_variables
from lockstep.tools.doctor.finding import failure, ok

HERE = ["lo", "eth0"]


def bad(lines):
    """Results that are not ok, as (level, text)."""
    return [(line.level, f"{line.message} {line.fix}") for line in lines if line.level != "well"]


def only(lines):
    found = bad(lines)
    assert len(found) == 1, found
    return found[0]


# ------------------------------------------------------------------------------------------------------------ variables


@pytest.mark.parametrize(
    "environment",
    [{}, {"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": "^docker0"}, {"GLOO_SOCKET_IFNAME": "eth0"}],
)
def test_check_variables_valid_environment_is_ok(environment):
    assert bad(check_variables(environment, HERE, 2)) == []


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({"NCCL_TIMEOUT": "1800"}, "advice", "unset NCCL_TIMEOUT; use --run.collective-timeout SECONDS"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "trouble", "matches no interface of this machine (lo, eth0)"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "trouble", "GLOO_SOCKET_IFNAME=eth matches no interface"),  # no prefix match
        ({"NCCL_P2P_DISABLE": "1"}, "advice", "GPUs communicate through the host"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "trouble", "unset RANK WORLD_SIZE"),
        ({"OMP_NUM_THREADS": "4096"}, "advice", "unset OMP_NUM_THREADS"),
        ({"OMP_WAIT_POLICY": "active"}, "advice", "unset OMP_WAIT_POLICY"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "advice", "the host waits for every kernel"),
    ],
)
def test_check_variables_reports_useless_or_harmful_variable(environment, level, words):
    found = only(check_variables(environment, HERE, 2))
    assert found[0] == level
    assert words in found[1]


def test_check_variables_ignores_disabled_variables():
    assert bad(check_variables({"NCCL_P2P_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": ""}, HERE, 2)) == []


# -------------------------------------------------------------------------------------------------------------- machine


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Simulate a machine where nvidia-smi lists two GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100, 81559 MiB, 3 MiB'\necho '1, NVIDIA H100, 81559 MiB, 3 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_check_devices_torch_without_cuda_is_trouble(gpus, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    assert "nvidia-smi lists 2 GPUs, but this torch was built without CUDA" in only(machine.check_devices(2))[1]


def test_check_devices_hidden_gpus_are_trouble(gpus, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset CUDA_VISIBLE_DEVICES" in only(machine.check_devices(2))[1]


def test_check_devices_advises_on_shared_and_busy_gpus(gpus, monkeypatch):
    card = namedtuple("Card", "name total_memory")("H100", 80 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    found = bad(machine.check_devices(4))
    assert [level for level, _ in found] == ["advice", "advice"]
    assert "4 processes share 1 visible GPU: reductions go over gloo, not NCCL." in found[0][1]
    assert "Train with --procs 1" in found[0][1]
    assert "other processes use the GPUs" in found[1][1]


def test_check_memory_too_little_memory_is_trouble(monkeypatch):
    memory = namedtuple("Memory", "available total")(2**29, 2**34)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert "use fewer --procs" in bad(machine.check_memory(2))[0][1]


def test_check_memory_small_shared_memory_is_advised_against(monkeypatch, tmp_path):
    usage = namedtuple("Usage", "total used free")(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "--shm-size 8g" in only(machine.check_memory(1, tmp_path))[1]


def test_check_memory_more_processes_than_cores_is_advised_against():
    assert "4096 processes share" in bad(machine.check_memory(4096))[-1][1]


def test_check_memory_low_open_file_limit_is_trouble(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    assert "ulimit -n 65536" in only(machine.check_memory(1))[1]


# ----------------------------------------------------------------------------------------------------- disk and network


def test_check_disk_missing_directory_is_ok_and_not_created(tmp_path):
    assert bad(disk.check_disk(tmp_path / "new" / "runs")) == []
    assert list(tmp_path.iterdir()) == []


def test_check_disk_unwritable_directory_is_trouble(tmp_path):
    (tmp_path / "file").touch()
    assert "nothing can be written" in only(disk.check_disk(tmp_path / "file"))[1]


def test_check_disk_nearly_full_disk_is_trouble(monkeypatch, tmp_path):
    usage = namedtuple("Usage", "total used free")(2**40, 2**40, 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "1 MiB are free" in only(disk.check_disk(tmp_path))[1]


def test_check_disk_non_atomic_rename_is_trouble(monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.replace", lambda self, target: None)
    assert "a rename in" in bad(disk.check_disk(tmp_path))[0][1]


def test_check_disk_without_hard_links_is_advised_against(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    assert "no hard links" in only(disk.check_disk(tmp_path))[1]


def test_check_network_unresolvable_host_name_is_reported(monkeypatch):
    def unknown(name):
        raise socket.gaierror("unknown")

    monkeypatch.setattr("socket.gethostbyname", unknown)
    assert "Add it to /etc/hosts" in only(network.check_network({"WANDB_MODE": "offline"}))[1]


def test_check_network_port_in_use_is_trouble():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        lines = network.check_network({"MASTER_PORT": port, "WANDB_MODE": "offline"})
        assert f"MASTER_PORT={port} is in use" in only(lines)[1]


def test_check_network_unreachable_wandb_advises_offline_mode(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no way there")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    monkeypatch.setattr("socket.create_connection", unreachable)
    assert "WANDB_MODE=offline" in only(network.check_network({}))[1]
    assert bad(network.check_network({"WANDB_MODE": "offline"})) == []


def test_check_gymnasium_packages_names_extra_of_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    found = list(gymnasium_packages.check_gymnasium_packages())
    assert len(found) == len(gymnasium_packages.FAMILIES)
    assert bad(found) == []
    assert any("pip install 'lockstep-rl[atari]'" in finding.message for finding in found)


def test_check_gymnasium_packages_broken_package_is_advice(monkeypatch):
    def broken(id, options):
        raise OSError("libengine.so is missing")

    monkeypatch.setattr("lockstep.tasks.gym.sync_envs.make", broken)
    found = bad(gymnasium_packages.check_gymnasium_packages())
    assert [level for level, _ in found] == ["advice"] * len(gymnasium_packages.FAMILIES)
    assert "libengine.so is missing pip install --force-reinstall 'lockstep-rl[mujoco]'" in found[0][1]


def test_check_rendering_mujoco_without_opengl_is_advice(monkeypatch):
    pytest.importorskip("mujoco")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(rendering, "headless_backend", lambda: "disabled")
    level, words = only(rendering.check_rendering())
    assert level == "advice"
    assert "apt install libegl1" in words


def test_check_rendering_invalid_mujoco_gl_is_trouble(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "mujoco" or None)
    monkeypatch.setenv("MUJOCO_GL", "opengl")
    assert "export MUJOCO_GL=egl" in only(rendering.check_rendering())[1]


# ----------------------------------------------------------------------------------------------- distributed smoke test


def test_check_distributed_failed_launch_is_trouble(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke_test, "launch_captured", lambda words, processes: "process 1 of 2 failed first.")
    assert "process 1 of 2 failed first." in only(smoke_test.check_distributed([], 2, tmp_path))[1]


def test_check_distributed_different_agents_are_trouble(monkeypatch, tmp_path):
    def train(words, processes):
        smoke_test.worker_main(tmp_path)
        return ""

    monkeypatch.setattr(smoke_test, "launch_captured", train)
    monkeypatch.setattr(smoke_test, "hash_of_run", lambda run: run.name)
    assert "did not train the same agent: together and alone" in only(smoke_test.check_distributed([], 1, tmp_path))[1]


@pytest.fixture
def examined(monkeypatch):
    """The command with one failing check and no real examination."""
    monkeypatch.setattr(
        "lockstep.cli.doctor._examine", lambda *_: iter([ok("cores", "2"), failure("disk", "full", "Make room.")])
    )


def test_doctor_trouble_prints_fix_and_exits_with_one(examined, capsys):
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "TROUBLE  disk        full" in printed
    assert "fix: Make room." in printed
    assert "1 trouble." in printed


def test_doctor_in_a_terminal_erases_the_spinner_before_each_line(examined, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    # Rich erases a spinner before a line only if both are written by one console.
    assert "checking this machine" not in captured.err
    assert "checking this machine" in captured.out


# ----------------------------------------------------------------------------------------------------------- bug report


def test_bug_report_has_findings_and_no_secrets(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL", "NCCL_SECRET_KEY", "CUDA_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    text = write_bug_report([failure("disk", "nothing can be written", "Choose another.")], 4)
    assert "hunter2" not in text
    assert "NCCL_DEBUG=INFO" in text
    assert "trouble  disk       nothing can be written" in text


def test_without_names_removes_user_host_and_addresses(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("getpass.getuser", lambda: "maria")
    monkeypatch.setenv("HOME", "/home/maria")
    text = without_names("node7 is 10.1.2.3, lo 127.0.0.1; /home/maria/runs, /data/maria/x, node70")
    assert text == "HOST is ADDRESS, lo 127.0.0.1; ~/runs, /data/USER/x, node70"
