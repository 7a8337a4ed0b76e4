"""The GPU diagnostic kit without a GPU: failing steps, report, redaction, and step calculations."""

import importlib
import json
import os
import signal
import socket
import time

import psutil
import pytest
import torch

from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.io.safe_read import JSON_BYTES
from lockstep.registry import RECIPES
from lockstep.tools.doctor.gpu import (
    benchmarks,
    gradients,
    machine,
    precision,
    proofs,
    recipes,
    runner,
    scaling,
    worker,
)
from lockstep.tools.doctor.gpu.process import OUTPUT_BYTES
from lockstep.tools.doctor.gpu.runner import Kit
from lockstep.tools.doctor.gpu.steps import KitStep, steps_for
from lockstep.tools.doctor.redaction import scrub, without_names

PASSES = """
import json, os
kit = json.loads(os.environ["LOCKSTEP_GPU_KIT"])
open(kit["result"], "w").write(json.dumps({"result": "passed", "reason": "", "found": {"gpus": kit["gpus"]}}))
"""
SEGFAULTS = "import ctypes; ctypes.string_at(0)"
HANGS = """
import os, subprocess, sys, time
own_group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(os.environ["CHILD"], "w").write(str(own_group.pid))
time.sleep(600)
"""
FLOODS = "import sys\nfor _ in range(2000): sys.stdout.write('x' * 10_000)\nsys.stdout.write('the end'); sys.exit(3)"
EXHAUSTS_MEMORY = "raise MemoryError('CUDA out of memory')"
FOUND_TOO_MUCH = """
import json, os
kit = json.loads(os.environ["LOCKSTEP_GPU_KIT"])
open(kit["result"], "w").write(json.dumps({"result": "passed", "reason": "", "found": {"a": "x" * 5_000_000}}))
"""


@pytest.fixture
def kit(tmp_path):
    (tmp_path / "scratch").mkdir()
    told = []
    kit = Kit(tmp_path / "report.json", True, tmp_path / "scratch", told.append)
    kit.gpus, kit.told = 2, told
    return kit


def run(kit, *steps):
    """Run steps given as (name, Python source, time limit); return the report file's content."""
    kit.run_steps([KitStep(name, ("-c", source), limit) for name, source, limit in steps])
    return json.loads(kit.path.read_text())


# -------------------------------------------------------------------------------------------------------- failing steps


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (SEGFAULTS, "ended by SIGSEGV"),
        (EXHAUSTS_MEMORY, "exit code 1"),
        (FLOODS, "exit code 3"),
        (FOUND_TOO_MUCH, "the step ended without a result"),
        ("pass", "the step ended without a result"),
    ],
)
def test_kit_runs_remaining_steps_after_a_failed_step(kit, source, reason):
    report = run(kit, ("before", PASSES, 20), ("planted", source, 20), ("after", PASSES, 20))
    assert [step["result"] for step in report["steps"]] == ["passed", "failed", "passed"]
    assert report["steps"][1]["reason"] == reason
    assert report["failed"] == ["planted"]
    assert report["steps"][2]["found"] == {"gpus": 2}
    assert len(kit.told) == 3
    assert kit.path.stat().st_size < JSON_BYTES


def test_kit_native_crash_records_python_stack(kit):
    report = run(kit, ("crash", SEGFAULTS, 20))
    assert any("Segmentation fault" in line for line in report["steps"][0]["output"])


def test_kit_huge_output_keeps_only_the_end(kit):
    output = run(kit, ("flood", FLOODS, 20))["steps"][0]["output"]
    assert output[-1].endswith("the end")
    assert sum(map(len, output)) <= OUTPUT_BYTES


def test_kit_step_over_time_limit_is_killed_with_its_children(kit, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    report = run(kit, ("hang", HANGS, 1.5), ("after", PASSES, 20))
    assert [step["result"] for step in report["steps"]] == ["failed", "passed"]
    assert "not finished after" in report["steps"][0]["reason"]
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the process started by the step is still running")


def test_kit_crashed_step_keeps_results_of_finished_parts(kit):
    source = (
        "import os, json, signal\nfrom lockstep.tools.doctor.gpu.worker import KIT, ResultRecord\n"
        "record = ResultRecord(**json.loads(os.environ[KIT]))\nrecord.add('first', 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    step = run(kit, ("crash", source, 30))["steps"][0]
    assert (step["result"], step["reason"], step["found"]) == ("failed", "ended by SIGKILL", {"first": 1})


def test_kit_keyboard_interrupt_is_recorded_before_it_is_raised(kit, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(kit, ("first", PASSES, 20), ("second", PASSES, 20))
    report = json.loads(kit.path.read_text())
    assert [(step["name"], step["reason"]) for step in report["steps"]] == [("first", "interrupted by the user")]
    assert report["finished"] is False


def test_kit_steps_without_time_left_are_skipped(tmp_path):
    kit = Kit(tmp_path / "report.json", True, tmp_path, lambda _: None, minutes=0.0)
    step = run(kit, ("late", PASSES, 20))["steps"][0]
    assert (step["result"], step["reason"]) == ("skipped", "no time left for this step")


def test_kit_step_stopped_by_total_time_limit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_MIN_STEP_SECONDS", 0.5)
    kit = Kit(tmp_path / "report.json", True, tmp_path, lambda _: None, minutes=2 / 60)
    report = run(kit, ("long", "import time; time.sleep(600)", 60), ("next", PASSES, 60))
    assert [step["result"] for step in report["steps"]] == ["skipped", "skipped"]
    assert "minutes of the kit were over" in report["steps"][0]["reason"]


def test_doctor_gpu_without_gpu_exits_with_advice_and_report(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("EMULATED_GPUS", raising=False)
    code = main(["doctor", "--gpu", "--out", str(tmp_path / "report.json")])
    told = capfd.readouterr().err
    assert code == 2
    assert "nvidia-smi" in told
    assert "https://pytorch.org/get-started/locally" in told
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"][0]["found"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("words", [["--out", "report.json"], ["--quick"], ["--gpu", "--out", "nowhere/report.json"]])
def test_doctor_incompatible_options_are_rejected(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) == 2


# ------------------------------------------------------------------------------------------------------------ redaction


def test_kit_report_of_failed_step_contains_no_names_or_secrets(kit, tmp_path, monkeypatch):
    home = tmp_path / "home" / "maria"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.example")
    monkeypatch.setattr("getpass.getuser", lambda: "maria")
    monkeypatch.setenv("HF_TOKEN", "hunter2-value")
    (home / "mine.py").write_text(
        "raise RuntimeError('node7.cluster.example node7 10.1.2.3 fe80::1c2d 0c:42:a1:00:11:22 hunter2-value '\n"
        "    'postgres://me:hunter3-word@db/runs GPU-5f2c1a9e-1111-2222-3333-0123456789ab ghp_0123456789abcdef')"
    )
    text = json.dumps(run(kit, ("leaks", f"import runpy; runpy.run_path({str(home / 'mine.py')!r})", 20)))
    assert "RuntimeError: HOST HOST ADDRESS ADDRESS ADDRESS SECRET" in text
    assert "~/mine.py" in text
    for secret in ("maria", "node7", "10.1.2.3", "fe80", "0c:42", "hunter", "5f2c1a9e", "ghp_"):
        assert secret not in text


@pytest.mark.parametrize(
    "text", ["c10::add at::Tensor", "12:34:56", "torch 2.13.0+cpu", "127.0.0.1 and ::1", "a 3:4:5 ratio", "x::y"]
)
def test_without_names_keeps_text_that_resembles_addresses(text):
    assert without_names(text) == text


def test_scrub_converts_non_finite_numbers_to_text():
    assert scrub([float("nan"), float("inf"), 1.0]) == ["nan", "inf", 1.0]


def test_scrub_keeps_dict_keys():
    assert scrub({"10.0.0.1": ["10.0.0.1", 1.5, None, True]}) == {"10.0.0.1": ["ADDRESS", 1.5, None, True]}


# -------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_steps_for_every_step_has_a_function(gpus, quick):
    steps = steps_for(gpus, quick)
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        module, function = step.args[5].split(":")
        assert callable(getattr(importlib.import_module(f"lockstep.tools.doctor.gpu.{module}"), function))


def test_steps_for_full_kit_runs_every_recipe():
    assert [s.name for s in steps_for(2, False) if s.name.startswith("recipe ")] == [f"recipe {n}" for n in RECIPES]


def test_worker_records_skips_failures_and_exceptions(tmp_path, monkeypatch, capsys):
    def outcome(function):
        monkeypatch.setenv(
            worker.KIT, json.dumps({"result": str(tmp_path / "a"), "gpus": 1, "quick": True, "scratch": str(tmp_path)})
        )
        monkeypatch.setattr(machine, "machine", function)
        worker.run_step(["machine:machine"])
        written = json.loads((tmp_path / "a").read_text())
        return written["result"], written["reason"]

    def skips(_):
        raise worker.Skip("no need")

    def fails(_):
        raise worker.Failure("too far")

    def raises(_):
        raise ValueError("bad\nvalue")

    def fails_in_a_part(record):
        with record.part("one"):
            raise worker.Failure("too far")
        with record.part("two"):
            raise worker.Skip("not here")

    assert outcome(lambda _: None) == ("passed", "")
    assert outcome(skips) == ("skipped", "no need")
    assert outcome(fails) == ("failed", "too far")
    assert outcome(raises) == ("failed", "ValueError: bad value")
    assert outcome(fails_in_a_part) == ("failed", "one: too far")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ImportError("No module named 'dm_control'"), worker.Skip),
        (ConfigError("the control suite needs dm_control.", "pip install 'lockstep-rl[dmc]'"), worker.Skip),
        (ConfigError("another problem."), ConfigError),
    ],
)
def test_needs_installed_skips_recipe_with_missing_package(error, kind):
    with pytest.raises(kind), recipes.needs_installed():
        raise error


@pytest.mark.parametrize(
    ("capability", "architectures", "support"),
    [
        ((9, 0), ["sm_80", "sm_90"], "compiled"),
        ((12, 0), ["sm_90", "sm_120a"], "compiled"),
        ((8, 6), ["sm_80", "sm_90"], "compatible"),
        ((12, 0), ["sm_90", "compute_90"], "from PTX"),
        ((6, 1), ["sm_75", "sm_80", "compute_80"], "not supported"),
    ],
)
def test_machine_support_follows_torch_arch_list(capability, architectures, support):
    assert machine.architecture_support(*capability, architectures) == support


def test_driver_info_contains_no_device_identifiers(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    row = "0, NVIDIA H100, 570.10, 81559 MiB, Default, Enabled, Enabled, Disabled, 5, 16, 700.00 W, 1980 MHz"
    tool.write_text(f"#!/bin/sh\ncase $1 in topo) printf '\\033[4mGPU0\\033[0m X\\n';; *) echo '{row}';; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    facts = machine.driver_info()
    assert (facts[0]["driver_version"], facts[0]["clocks.max.sm"]) == ("570.10", "1980 MHz")
    assert not any("uuid" in name or "serial" in name for name in facts[0])


def test_gradient_difference_is_relative_and_ignores_rounding_of_zero():
    wanted = [torch.tensor([3.0, 4.0]), torch.tensor([1e-9])]
    assert gradients.difference([torch.tensor([3.0, 4.5]), torch.tensor([1e-9])], wanted) == pytest.approx(0.1)
    assert gradients.difference([torch.tensor([3.0, 4.0]), torch.tensor([3e-9])], wanted) < 1e-6
    scaled = [1024 * part for part in wanted]
    assert gradients.difference(scaled, wanted, normalize=True) < 1e-6
    assert gradients.difference([torch.tensor([1.0])], [torch.tensor([0.0])]) == float("inf")


def test_compare_gradients_wrong_or_zero_gradient_fails(tmp_path):
    record = worker.ResultRecord(str(tmp_path / "a"), 1, True, str(tmp_path))
    with pytest.raises(worker.Failure, match="more than 1e-03"):
        recipes.compare_gradients(record, [[torch.ones(3)]], [[1.01 * torch.ones(3)]])
    with pytest.raises(worker.Failure, match="a gradient is zero"):
        recipes.compare_gradients(record, [[torch.zeros(3)]], [[torch.zeros(3)]])


@pytest.mark.parametrize(
    "found",
    [
        {"finite": False, "difference_from_fp32": 0.0, "product_error": 0.0},
        {"finite": True, "difference_from_fp32": float("nan"), "product_error": 0.0},
        {"finite": True, "difference_from_fp32": 0.1, "product_error": 0.1},
    ],
)
def test_precision_check_large_error_fails(found):
    with pytest.raises(worker.Failure):
        precision.check("bf16", found)


def test_time_limit_interrupts_python_code():
    with pytest.raises(TimeoutError), recipes.time_limit(0.1):
        time.sleep(10)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(("mode", "result"), [("off", "failed"), ("graphs", "skipped"), ("on", "skipped")])
def test_bench_mode_failure_is_skipped_when_compiled(tmp_path, monkeypatch, mode, result):
    def unsupported(*_):
        raise RuntimeError("Triton has no backend here")

    monkeypatch.setattr(benchmarks, "timed", unsupported)
    kit = {"result": str(tmp_path / "a"), "gpus": 1, "quick": True, "scratch": str(tmp_path)}
    monkeypatch.setenv(worker.KIT, json.dumps(kit))
    worker.run_step(["benchmarks:mode", mode])
    written = json.loads((tmp_path / "a").read_text())
    assert written["result"] == result
    assert "Triton has no backend here" in written["reason"]


def test_process_counts_end_at_all_gpus():
    assert [proofs.process_counts(gpus) for gpus in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_bandwidth_covers_64_bytes_to_256_mebibytes():
    assert (scaling.SIZES[0], scaling.SIZES[-1]) == (64, 256 * 2**20)
    row = scaling.bandwidths({"1000": 1e-3}, 4)[0]
    assert (row["bytes_per_second"], row["bus_bytes_per_second"]) == (1e6, 1.5e6)


# --------------------------------------------------------------------------------------------------------------- plan


@pytest.fixture
def kit_file(tmp_path):
    """Write a report with the shares of one recipe and a network."""
    line = {"fixed": 1e-3, "per_sample": 1e-5}
    shares = {"rollout_step": line, "update": line, "rest": line, "num_envs": 8, "batch_size": 256, "horizon": 32}
    shares |= {"updates": 20, "samples": 256, "sent": [["gradient", 36620, 20.0]], "state_bytes": 1}
    shares |= {"rollout_bytes": 1.0, "activation_bytes": 1.0, "jitter": []}
    network = {"processes": 2, "seconds": {"64": 3e-5, "268435456": 2e-3}, "contention": 1.0, "jitter": []}

    def write(network=network):
        path = tmp_path / "report.json"
        path.write_text(json.dumps({"steps": [], "shares": {"gym-ppo": shares}, "network": network}))
        return str(path)

    return write


def plan(capsys, *words):
    code = main(["plan", *words, "--gpus", "1", "8", "--json"])
    told = capsys.readouterr()
    return code, json.loads(told.out) if code == 0 else told.err


def test_plan_reads_shares_and_network_from_kit_report(capsys, kit_file):
    code, found = plan(capsys, "gym-ppo", "--measured", kit_file())
    assert code == 0
    assert found["network"]["name"] == "report"
    assert found["network"]["inside"]["bandwidth"] == pytest.approx(268435456 / 2e-3, rel=0.1)
    assert found["shares"]["batch_size"] == 256


def test_plan_uses_given_or_default_network_without_kit_network(capsys, kit_file):
    assert plan(capsys, "gym-ppo", "--measured", kit_file(None))[1]["network"]["name"] == "nvlink+ib"
    found = plan(capsys, "gym-ppo", "--measured", kit_file(), "--network", "ethernet-10g")[1]
    assert found["network"]["name"] == "ethernet-10g"


def test_plan_missing_recipe_error_lists_recipes_of_kit_report(capsys, kit_file):
    code, told = plan(capsys, "snake-ppo", "--measured", kit_file())
    assert code == 2
    assert "contains no measurement of snake-ppo. It contains: gym-ppo." in told
