"""The doctor: each planted trouble is named with its fix, a sound machine has none, and a bundle gives nothing away."""

import os
import socket
from collections import namedtuple

import pytest

from lockstep.cli import main
from lockstep.tools.doctor import disk, machine, network, rendering, smoke_test
from lockstep.tools.doctor.bug_report import without_names, write_bug_report
from lockstep.tools.doctor.environment import check_variables
from lockstep.tools.doctor.finding import CheckResult, failure, ok

HERE = ["lo", "eth0"]


def bad(lines):
    """What was found and is not well, as (level, words)."""
    return [(line.level, f"{line.says} {line.fix}") for line in lines if line.level != "well"]


def only(lines):
    found = bad(lines)
    assert len(found) == 1, found
    return found[0]


def test_what_is_not_well_must_have_a_fix():
    with pytest.raises(ValueError, match="has no fix"):
        CheckResult("disk", "it is full", "trouble")


# ------------------------------------------------------------------------------------------------------------ variables


@pytest.mark.parametrize(
    "environment",
    [{}, {"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": "^docker0"}, {"GLOO_SOCKET_IFNAME": "eth0"}],
)
def test_a_sound_environment_is_well(environment):
    assert bad(check_variables(environment, HERE, 2)) == []


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({"NCCL_TIMEOUT": "1800"}, "advice", "unset NCCL_TIMEOUT; use --run.collective-timeout SECONDS"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "trouble", "names no interface of this machine (lo, eth0)"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "trouble", "GLOO_SOCKET_IFNAME=eth names no interface"),  # no prefixes here
        ({"NCCL_P2P_DISABLE": "1"}, "advice", "GPUs talk to each other through the host"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "trouble", "unset RANK WORLD_SIZE"),
        ({"OMP_NUM_THREADS": "4096"}, "advice", "unset OMP_NUM_THREADS"),
        ({"OMP_WAIT_POLICY": "active"}, "advice", "unset OMP_WAIT_POLICY"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "advice", "every kernel is waited for"),
    ],
)
def test_a_variable_that_does_nothing_or_harms_is_named(environment, level, words):
    found = only(check_variables(environment, HERE, 2))
    assert found[0] == level
    assert words in found[1]


def test_a_variable_that_is_switched_off_is_left_alone():
    assert bad(check_variables({"NCCL_P2P_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": ""}, HERE, 2)) == []


# -------------------------------------------------------------------------------------------------------------- machine


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine on which NVIDIA's tool lists two GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100, 81559 MiB, 3 MiB'\necho '1, NVIDIA H100, 81559 MiB, 3 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_gpus_that_torch_was_not_built_for_are_trouble(gpus, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    assert "2 GPUs are here, and this torch was built without CUDA" in only(machine.check_devices(2))[1]


def test_gpus_that_a_variable_hides_are_trouble(gpus, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset CUDA_VISIBLE_DEVICES" in only(machine.check_devices(2))[1]


def test_more_processes_than_gpus_and_others_on_them_are_named(gpus, monkeypatch):
    card = namedtuple("Card", "name total_memory")("H100", 80 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: card)
    found = bad(machine.check_devices(4))
    assert [level for level, _ in found] == ["advice", "advice"]
    assert "4 processes share 1 visible GPU: reductions go over gloo, not NCCL." in found[0][1]
    assert "Train with --procs 1" in found[0][1]
    assert "other processes compute on the GPUs" in found[1][1]


def test_too_little_memory_is_trouble(monkeypatch):
    memory = namedtuple("Memory", "available total")(2**29, 2**34)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert "use fewer --procs" in bad(machine.check_memory(2))[0][1]


def test_the_shared_memory_of_a_bare_container_is_advised_against(monkeypatch, tmp_path):
    usage = namedtuple("Usage", "total used free")(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "--shm-size 8g" in only(machine.check_memory(1, tmp_path))[1]


def test_more_processes_than_cores_are_advised_against():
    assert "4096 processes share" in bad(machine.check_memory(4096))[-1][1]


def test_few_open_files_are_trouble(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    assert "ulimit -n 65536" in only(machine.check_memory(1))[1]


# ----------------------------------------------------------------------------------------------------- disk and network


def test_a_directory_that_does_not_exist_yet_is_well_and_not_made(tmp_path):
    assert bad(disk.check_disk(tmp_path / "new" / "runs")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_trouble(tmp_path):
    (tmp_path / "file").touch()
    assert "nothing can be written" in only(disk.check_disk(tmp_path / "file"))[1]


def test_a_disk_that_is_nearly_full_is_trouble(monkeypatch, tmp_path):
    usage = namedtuple("Usage", "total used free")(2**40, 2**40, 2**20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "1 MiB are free" in only(disk.check_disk(tmp_path))[1]


def test_a_rename_that_is_not_whole_is_trouble(monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.replace", lambda self, target: None)
    assert "a rename in" in bad(disk.check_disk(tmp_path))[0][1]


def test_a_disk_without_links_is_advised_against(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    assert "no hard links" in only(disk.check_disk(tmp_path))[1]


def test_a_host_name_without_an_address_is_named(monkeypatch):
    def unknown(name):
        raise socket.gaierror("unknown")

    monkeypatch.setattr("socket.gethostbyname", unknown)
    assert "Add it to /etc/hosts" in only(network.check_network({"WANDB_MODE": "offline"}))[1]


def test_a_port_in_use_is_trouble():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        lines = network.check_network({"MASTER_PORT": port, "WANDB_MODE": "offline"})
        assert f"MASTER_PORT={port} is in use" in only(lines)[1]


def test_wandb_that_cannot_be_reached_is_advised_to_be_offline(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no way there")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    monkeypatch.setattr("socket.create_connection", unreachable)
    assert "WANDB_MODE=offline" in only(network.check_network({}))[1]
    assert bad(network.check_network({"WANDB_MODE": "offline"})) == []


def test_a_way_to_draw_that_does_not_exist_is_trouble(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "mujoco" or None)
    monkeypatch.setenv("MUJOCO_GL", "opengl")
    assert "export MUJOCO_GL=egl" in only(rendering.check_rendering())[1]


# ------------------------------------------------------------------------------------------------------------- together


def test_processes_that_cannot_train_together_are_trouble(monkeypatch, tmp_path):
    monkeypatch.setattr(smoke_test, "launch_captured", lambda words, processes: "process 1 of 2 failed first.")
    assert "process 1 of 2 failed first." in only(smoke_test.check_distributed([], 2, tmp_path))[1]


def test_agents_that_differ_are_trouble(monkeypatch, tmp_path):
    def train(words, processes):
        smoke_test.worker_main(tmp_path)
        return ""

    monkeypatch.setattr(smoke_test, "launch_captured", train)
    monkeypatch.setattr(smoke_test, "hash_of_run", lambda run: run.name)
    assert "did not train the same agent: together and alone" in only(smoke_test.check_distributed([], 1, tmp_path))[1]


@pytest.fixture
def examined(monkeypatch):
    """The command on a machine where one thing is wrong and nothing is tried."""
    monkeypatch.setattr(
        "lockstep.cli.doctor._examine", lambda *_: iter([ok("cores", "2"), failure("disk", "full", "Make room.")])
    )


def test_trouble_is_told_with_its_fix_and_by_the_exit_code(examined, capsys):
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "TROUBLE  disk        full" in told
    assert "fix: Make room." in told
    assert "1 trouble." in told


# --------------------------------------------------------------------------------------------------------------- bundle


def test_a_bundle_has_what_helps_and_no_secret(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL", "NCCL_SECRET_KEY", "CUDA_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    text = write_bug_report([failure("disk", "nothing can be written", "Choose another.")], 4)
    assert "hunter2" not in text
    assert "NCCL_DEBUG=INFO" in text
    assert "trouble  disk       nothing can be written" in text


def test_a_bundle_names_neither_person_nor_host_nor_address(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("getpass.getuser", lambda: "maria")
    monkeypatch.setenv("HOME", "/home/maria")
    text = without_names("node7 is 10.1.2.3, lo 127.0.0.1; /home/maria/runs, /data/maria/x, node70")
    assert text == "HOST is ADDRESS, lo 127.0.0.1; ~/runs, /data/USER/x, node70"
