"""`lockstep doctor --gpu` end to end on emulated GPUs: every step runs, and the report is complete."""

import json
import os
import socket
import sys

import pytest

import emulated_cuda
from helpers.multiprocess import command
from lockstep.cli import main
from lockstep.tools.doctor.gpu.steps import MACHINE, steps_for

SECONDS = 960.0
"""Time limit of the command, which ends itself within 15 minutes on any machine."""
SKIPPED = {
    1: {"prove over NCCL", "bandwidth"},
    2: set(),
    4: set(),
}
"""Steps that do not apply, by number of GPUs."""


@pytest.mark.slow  # every step starts processes: two minutes
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_doctor_gpu_quick_runs_every_step(tmp_path, capsys, gpus):
    path, contexts = tmp_path / "report.json", tmp_path / "contexts"
    contexts.mkdir()
    words = [sys.executable, "-m", "lockstep", "doctor", "--gpu", "--quick", "--out", str(path)]
    settings = {"HF_TOKEN": "hunter2-token", "EMULATED_CUDA_CONTEXTS": str(contexts)}
    environment = emulated_cuda.environment(gpus, **settings)
    ended = command(words, directory=tmp_path, environment=environment, seconds=SECONDS)
    assert ended.code == 0, ended.output
    assert f"The report is in {path}" in ended.output
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "contexts"}

    text = path.read_text()
    assert "hunter2" not in text
    assert socket.gethostname() not in text
    report = json.loads(text)
    assert [step["name"] for step in report["steps"]] == [step.name for step in [MACHINE, *steps_for(gpus, True)]]
    for step in report["steps"]:
        if step["name"] == "bench compile=on":
            assert step["result"] == "passed" or step["reason"]  # torch.compile for CUDA needs Triton and a driver
        else:
            assert step["result"] == ("skipped" if step["name"] in SKIPPED[gpus] else "passed"), step
    found = {step["name"]: step["found"] for step in report["steps"]}
    assert found["replicas"]["replicas"]["updates"] >= 128
    assert found["recipe gym-ppo"]["memory"]["allocated_bytes"] > 0
    lines = found["recipe gym-ppo"]["host_syncs"]["lines"]
    assert any(
        line["line"].startswith("tasks/gym/env.py:") for line in lines
    )  # actions are copied to the host environments
    assert any("process 1 on HOST" in line for line in found["hang drill"]["report"])
    proofs = [found[name].get("runs", []) for name in ("prove over NCCL", "prove over gloo")]
    assert len({row["hash"] for rows in proofs for row in rows}) == 1

    assert main(["plan", "gym-ppo", "--measured", str(path), "--gpus", "1", "8", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["network"]["name"] == ("report" if gpus > 1 else "nvlink+ib")
    assert planned["fixed_batch"][1]["steps_per_second"] > 0


def test_doctor_gpu_parent_process_does_not_import_torch(tmp_path):
    """The process that starts the steps must not import torch, so that it cannot create a CUDA context."""
    source = (
        "import sys, lockstep.cli.doctor, lockstep.tools.doctor.gpu.runner\n"
        "assert not any(name == 'torch' or name.startswith('torch.') for name in sys.modules)"
    )
    ended = command([sys.executable, "-c", source], environment=dict(os.environ))
    assert ended.code == 0, ended.output
