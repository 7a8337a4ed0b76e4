"""Launching on emulated GPUs: device assignment, settings refused before the start, and which processes use a GPU."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import emulated_cuda
from helpers.multiprocess import command, outcomes, together
from helpers.tiny_recipes import hash_of
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.distributed.runtime import half_precision
from lockstep.launch.device import choose_device, configure_torch, device_notes, device_type
from lockstep.launch.world import WorldInfo

LOCKSTEP = [sys.executable, "-m", "lockstep"]


def on(gpus, *words, directory=None, **settings):
    """Run `lockstep WORDS` on a machine with emulated GPUs."""
    return command([*LOCKSTEP, *words], directory=directory, environment=emulated_cuda.environment(gpus, **settings))


def train(directory, name, *words):
    run = [
        "run.device=cuda",
        "run.reduction=exact",
        "run.eval_every=none",
        f"run.runs_dir={directory}",
        f"run.name={name}",
    ]
    return ["train", "gym-ppo", "--smoke", "run.total_samples=512", *run, *words]


# -- how many processes ------------------------------------------------------------------------------------------------


def test_train_with_more_processes_than_gpus_is_refused_before_start(tmp_path):
    contexts = tmp_path / "contexts"
    contexts.mkdir()
    ended = on(1, *train(tmp_path, "run", "--procs", "2"), EMULATED_CUDA_CONTEXTS=str(contexts))
    assert ended.code == 2
    assert "2 processes need a GPU each, and 1 GPU is visible on this machine." in ended.output
    assert "--run.share-gpu" in ended.output
    assert list(contexts.iterdir()) == []
    assert not (tmp_path / "run").exists()


def test_share_gpu_trains_the_same_agent_on_two_processes(tmp_path):
    for name, procs, words in (("one", "1", []), ("two", "2", ["run.share_gpu=true"])):
        ended = on(1, *train(tmp_path, name, "--procs", procs, *words))
        assert ended.code == 0, ended.output
    assert hash_of(tmp_path / "one") == hash_of(tmp_path / "two")


def test_distributed_and_procs_auto_start_one_process_per_gpu(tmp_path):
    started = on(2, *train(tmp_path, "run", "--distributed"))
    assert started.code == 0, started.output
    assert "2 processes · cuda" in started.output
    resumed = on(2, "resume", tmp_path / "run", "--procs", "auto", "--total-samples", "768")
    assert resumed.code == 0, resumed.output
    assert "2 processes · cuda" in resumed.output
    assert "the CPU may be faster than cuda" in resumed.output


# -- which device ------------------------------------------------------------------------------------------------------


def own_device(share=False):
    """Return the physical GPU of each process if a scheduler makes one GPU visible per process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0" if share else os.environ["RANK"]
    with Runtime.start(RunConfig(device="cuda", share_gpu=share)) as runtime:
        total = runtime.all_reduce_sum(torch.ones(1, device=runtime.device)).item()
        backend = torch.distributed.get_backend_config()
        return torch.cuda.get_device_properties(runtime.device).pci_bus_id, total, "nccl" in backend


def test_process_with_one_visible_gpu_uses_it_with_nccl():
    found = together(own_device, 2, environment={"EMULATED_GPUS": "2"})
    assert found == [[0, 2.0, True], [1, 2.0, True]]


def test_processes_that_share_a_gpu_use_gloo():
    found = together(own_device, 2, True, environment={"EMULATED_GPUS": "2"})
    assert found == [[0, 2.0, False]] * 2


def refused():
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    with Runtime.start(RunConfig(device="cuda")):
        pass


def test_processes_on_the_same_gpu_without_share_gpu_are_refused():
    for outcome in outcomes(refused, 2, environment={"EMULATED_GPUS": "2"}):
        assert outcome.error.startswith("ConfigError: processes 0, 1 are on the same GPU.")


def interface():
    with Runtime.start(RunConfig(device="cuda")):
        return os.environ.get("NCCL_SOCKET_IFNAME"), os.environ.get("GLOO_SOCKET_IFNAME")


def test_nccl_uses_loopback_on_one_host_unless_interface_is_set():
    assert together(interface, 2, environment={"EMULATED_GPUS": "2"}) == [["=lo", "lo"]] * 2
    chosen = {"EMULATED_GPUS": "2", "NCCL_SOCKET_IFNAME": "eth7"}
    assert [name for name, _ in together(interface, 2, environment=chosen)] == ["eth7"] * 2


def test_device_auto_prefers_cuda_then_mps_then_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert device_type("auto") == "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert device_type("auto") == "mps"
    assert choose_device("auto", WorldInfo()) == torch.device("mps")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert device_type("auto") == "cpu"


# -- arithmetic --------------------------------------------------------------------------------------------------------


def half():
    return str(half_precision("amp", torch.device("cuda", 0)))


@pytest.mark.parametrize(("capability", "dtype"), [("7.0", "float16"), ("7.5", "float16"), ("8.0", "bfloat16")])
def test_amp_uses_bf16_only_with_hardware_support(capability, dtype):
    environment = {"EMULATED_GPUS": "1", "EMULATED_GPU_CAPABILITY": capability}
    assert together(half, 1, environment=environment) == [f"torch.{dtype}"]


@pytest.mark.parametrize(("reduction", "tf32"), [("fast", True), ("fast", False), ("exact", False)])
def test_tf32_follows_the_setting_in_matrix_products_and_convolutions(reduction, tf32):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        configure_torch(RunConfig(reduction=reduction, tf32=tf32), WorldInfo())
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_tf32_is_refused_in_exact_mode():
    ended = command([*LOCKSTEP, "train", "gym-ppo", "--smoke", "run.tf32=true", "run.reduction=exact"])
    assert ended.code == 2
    assert "run.tf32" in ended.output


# -- processes that use a GPU ------------------------------------------------------------------------------------------


def test_launcher_has_no_cuda_context_even_when_it_autoscales(tmp_path):
    contexts = tmp_path / "contexts"
    contexts.mkdir()
    (tmp_path / "quick.py").write_text(
        "import lockstep.recipes.snake_ppo as base, lockstep.tools.bench.autoscale as scaling\n"
        "scaling.MAX_FACTOR = 1\n"
        "class Quick(base.SnakePPO): ...\n"
    )
    words = [
        tmp_path / "quick.py",
        "--smoke",
        "--autoscale",
        "--procs",
        "2",
        "run.total_samples=512",
        "run.eval_every=none",
    ]
    environment = os.environ | emulated_cuda.environment(2, EMULATED_CUDA_CONTEXTS=str(contexts), OMP_NUM_THREADS="1")
    line = [*LOCKSTEP, "train", *map(str, words), "run.device=cuda", f"run.runs_dir={tmp_path}"]
    launcher = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, output
    assert "Scaled to this machine:" in output
    users = {int(path.name.split(".")[0]) for path in contexts.iterdir()}
    assert launcher.pid not in users
    assert len(users) == 3  # the probe and two workers


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--episodes", "2"],
        pytest.param(["play", "--max-steps", "3", "--gif", "a.gif"], marks=pytest.mark.slow),  # it loads as eval does
    ],
    ids=["eval", "play"],
)
def test_command_uses_the_gpu_unless_device_is_cpu(tmp_path, words):
    trained = on(0, *train(tmp_path, "run")[:3], "run.total_samples=256", f"run.runs_dir={tmp_path}", "run.name=run")
    assert trained.code == 0, trained.output
    for device, used in (([], 1), (["--device", "cpu"], 0)):
        contexts = tmp_path / f"contexts{len(device)}"
        contexts.mkdir()
        line = [words[0], tmp_path / "run", *words[1:], *device]
        ended = on(1, *line, directory=tmp_path, EMULATED_CUDA_CONTEXTS=str(contexts))
        assert ended.code == 0, ended.output
        assert len(list(contexts.iterdir())) == used


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_doctor_trains_on_all_gpus(tmp_path, gpus):
    ended = on(gpus, "doctor", "--dir", tmp_path)
    assert ended.code == 0, ended.output
    assert "trained the same agent" in ended.output
    assert ("processes share 1 visible GPU" in ended.output) is (gpus == 1)


@pytest.mark.slow  # `doctor --gpu` does the same
def test_prove_runs_two_processes_on_one_gpu():
    ended = on(1, "prove", "gym-ppo", "--procs", "1", "2", "--iterations", "2", "run.device=cuda")
    assert ended.code == 0, ended.output
    assert "2 processes share 1 visible GPU" in ended.output
    assert "One agent." in ended.output


@pytest.mark.parametrize(
    ("device", "parameters", "batch", "noted"),
    [("cuda", 9_000, 128, True), ("mps", 9_000, 64, True), ("cuda", 300_000, 2048, False), ("cpu", 9_000, 256, False)],
)
def test_device_notes_of_small_network_suggest_the_cpu(device, parameters, batch, noted):
    weights = {"weight": torch.zeros(parameters, requires_grad=True)}
    algorithm, config = SimpleNamespace(model_state_dict=lambda: weights), SimpleNamespace(batch_size=batch)
    notes = device_notes(torch.device(device), algorithm, config)
    assert bool(notes) is noted
    assert ("--run.device cpu" in "".join(notes)) is noted
