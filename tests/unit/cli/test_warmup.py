"""`lockstep warmup` compiles kernels into the cache, and later runs compile nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config import ConfigError
from lockstep.tools.doctor.kernels import check_kernels
from lockstep.tools.warmup import warm_up

WARM_UP = """
from lockstep import registry
from lockstep.tools import warmup
warmup.RECIPES = {"gym-ppo": ""}
from lockstep.cli import main
main(["warmup"])
"""


@pytest.mark.slow
def test_training_after_warmup_compiles_nothing(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    settings = [f"run.runs_dir={tmp_path}", "run.device=cpu"]

    def run(*words):
        ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout + ended.stderr

    said = run("-c", WARM_UP)
    assert "compiling numba kernels" in said
    directory = re.search(r"Compiled \d+ kernels \(\d+ s\): (.*)", said)
    assert Path(directory[1]).is_relative_to(tmp_path / "cache")
    assert list(Path(directory[1]).parent.rglob("*.nbi"))
    assert "All kernels were in the cache" in run("-c", WARM_UP)
    assert "compiling" not in run("-m", "lockstep", "train", "gym-ppo", "--smoke", *settings)


def test_doctor_reports_a_failed_compilation_with_a_fix(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = check_kernels(lambda _: None)
    assert result.level == "trouble"
    assert "lockstep warmup" in result.fix


def test_warmup_without_an_extra_skips_the_recipe_with_the_reason(monkeypatch):
    def missing(_):
        raise ConfigError("dm_control is not installed.", "Install it.")

    monkeypatch.setattr("lockstep.tools.warmup.RECIPES", {"dmc-tdmpc2": ""})
    monkeypatch.setattr("lockstep.tools.warmup._train_briefly", missing)
    lines = []
    warm_up(lines.append)
    assert lines[-1].endswith("skipped: dm_control is not installed.")
