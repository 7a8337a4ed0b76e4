"""The package with the CUDA build of torch, on a machine where it finds no GPU: clear messages, no crash.

The build is installed from PyPI into an environment that is deleted afterwards: 3 GB to download, 5 GB on disk, about
7 minutes. CUDA_BUILD_VENV=DIR uses an existing environment and keeps it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ROOM = 12 * 10**9
"""Bytes needed for the downloads and the environment."""
INSTALL = ("install", "--progress-bar", "off", "--no-cache-dir", "--index-url", "https://pypi.org/simple")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def clean():
    """Return the environment variables without those that select another torch, another Lockstep or emulated GPUs."""
    dropped = ("PYTHONPATH", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "EMULATED_GPUS", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    kept |= {"PIP_CONFIG_FILE": os.devnull, "COLUMNS": "200"}
    return kept | ({"CUDA_VISIBLE_DEVICES": ""} if Path("/dev/nvidiactl").exists() else {})


def ended(words, seconds, **options):
    """Run a command; return its exit code and its standard output and error."""
    done = subprocess.run(
        [str(word) for word in words],
        env=clean(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        **options,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The directory of the programs of an environment with the CUDA build of torch and this Lockstep."""
    given = os.environ.get("CUDA_BUILD_VENV")
    venv = Path(given) if given else tmp_path_factory.mktemp("cuda-build") / "venv"
    python = venv / "bin" / "python"
    try:
        if not given:
            if shutil.disk_usage(venv.parent).free < ROOM:
                pytest.skip(f"The CUDA build of torch needs {ROOM / 1e9:.0f} GB, which {venv.parent} does not have.")
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            wanted = f"torch=={torch.__version__.partition('+')[0]}"
            code, output = ended([python, "-m", "pip", *INSTALL, wanted], 2400)
            if code:
                pytest.skip(f"{wanted} cannot be fetched from PyPI: {output.strip().splitlines()[-1]}")
        code, output = ended(
            [python, "-m", "pip", *INSTALL, *(["--force-reinstall", "--no-deps"] if given else []), ROOT], 900
        )
        assert code == 0, output[-2000:]
        code, output = ended([python, "-c", "import torch; print(torch.version.cuda)"], 300)
        assert code == 0, output[-2000:]
        if output.strip() == "None":
            pytest.skip("PyPI's torch for this platform is built without CUDA.")
        yield venv / "bin"
    finally:
        if not given:
            shutil.rmtree(venv, ignore_errors=True)


def lockstep(programs, directory, *words):
    code, output = ended([programs / "lockstep", *words], 600, cwd=directory)
    assert "Traceback" not in output, output
    return code, output


def test_package_imports_with_the_cuda_build(programs, tmp_path):
    script = "import lockstep, torch; print(torch.version.cuda, torch.cuda.is_available(), lockstep.__file__)"
    code, output = ended([programs / "python", "-c", script], 300, cwd=tmp_path)
    assert code == 0, output
    assert re.fullmatch(r"\d+\.\d+ False .*site-packages/lockstep/__init__.py\n", output), output  # and no warning


def test_help_and_doctor_run_with_the_cuda_build(programs, tmp_path):
    code, output = lockstep(programs, tmp_path, "--help")
    assert code == 0
    assert "lockstep train" in output
    code, output = lockstep(programs, tmp_path, "doctor")
    assert code == 0, output
    assert "no GPU" in output


@pytest.mark.parametrize("procs", ["1", "2", "auto"])
def test_training_on_cuda_is_refused_with_a_message(programs, tmp_path, procs):
    code, output = lockstep(programs, tmp_path, "train", "snake-ppo", "--smoke", "--procs", procs, "run.device=cuda")
    assert code == 2
    # Lines about a slow import of torch may come first.
    refusal = r"(?m)^lockstep: --run.device is cuda, and torch [\d.]+\+cu\d+ sees no CUDA device.$"
    assert re.search(refusal, output), output
    assert "or use --run.device cpu" in output


def test_training_evaluation_and_resume_use_the_cpu_with_the_cuda_build(programs, tmp_path):
    train = ("train", "snake-ppo", "--smoke", "run.name=here")
    for words in (
        train,
        ("eval", "runs/here", "--episodes", "4"),
        ("resume", "runs/here", "--procs", "2", "--total-samples", "8192"),
    ):
        code, output = lockstep(programs, tmp_path, *words)
        assert code == 0, output
    code, output = lockstep(programs, tmp_path, "eval", "runs/here", "--device", "cuda")
    assert code == 2
    assert "sees no CUDA device" in output
