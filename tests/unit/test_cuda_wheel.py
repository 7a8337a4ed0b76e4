"""The CUDA build of torch on a machine without a GPU: clear messages and no crash.

The wheel and what it needs are several GB, installed into a directory of the test's own. TORCH_CUDA names a directory
that has them already.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import command

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def torch_with_cuda(tmp_path_factory):
    if "TORCH_CUDA" in os.environ:
        return os.environ["TORCH_CUDA"]
    place = tmp_path_factory.mktemp("torch-cuda")
    # The index alone: this machine's settings may point to a CPU build.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    words = ["pip", "install", "--quiet", "--target", str(place), "--index-url", "https://pypi.org/simple"]
    ended = subprocess.run(
        [sys.executable, "-m", *words, "torch==2.13.0"], env=environment, capture_output=True, text=True, timeout=1800
    )
    if ended.returncode:
        pytest.skip(f"the CUDA build of torch could not be installed: {ended.stderr.strip()[-300:]}")
    return str(place)


def run(torch_with_cuda, *words):
    path = os.pathsep.join([torch_with_cuda, str(SOURCE)])
    return command([sys.executable, *words], environment={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""})


def test_this_is_the_cuda_build(torch_with_cuda):
    ended = run(torch_with_cuda, "-c", "import lockstep, torch; print(torch.version.cuda, torch.cuda.is_available())")
    assert ended.code == 0, ended.output
    version, available = ended.output.split()[-2:]
    assert version != "None"
    assert available == "False"


@pytest.mark.parametrize("words", [["--help"], ["train", "gym-ppo", "--help"], ["doctor"]])
def test_commands_work_without_a_gpu(torch_with_cuda, words):
    ended = run(torch_with_cuda, "-m", "lockstep", *words)
    assert ended.code == 0, ended.output
    assert "Traceback" not in ended.output


def test_asking_for_cuda_says_that_there_is_none(torch_with_cuda, tmp_path):
    words = ["train", "gym-ppo", "--smoke", "run.device=cuda", f"run.dir={tmp_path}"]
    ended = run(torch_with_cuda, "-m", "lockstep", *words)
    assert ended.code == 2, ended.output
    assert "sees no CUDA device" in ended.output
    assert "--run.device cpu" in ended.output
