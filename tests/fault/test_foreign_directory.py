"""No command executes code from the current directory, such as an untrusted run directory."""

import sys
from pathlib import Path

import pytest

from helpers.multiprocess import command
from lockstep.cli import COMMANDS

pytestmark = pytest.mark.distributed

MODULES = ("numpy", "torch", "sitecustomize", "usercustomize", "yaml", "gymnasium", "tyro", "rich", "numba", "psutil")
LOCKSTEP = [sys.executable, "-m", "lockstep"]
SMALL = ["run.total_samples=512", "run.record_video=false"]
CASES = [
    ["train", "gym-ppo", "--smoke", "--procs", "2", "run.runs_dir=elsewhere", "run.name=new", *SMALL],
    ["train", "gym-ppo", "--smoke", "run.runs_dir=elsewhere", "run.name=alone", "task.num_workers=1", *SMALL],
    ["resume", ".", "--procs", "2"],
    ["resume", "."],
    ["fork", ".", "run.total_samples=1024", "run.runs_dir=elsewhere"],
    ["eval", ".", "--episodes", "2"],
    ["play", ".", "--max-steps", "2"],
    ["export", ".", "--to", "safetensors", "--out", "out"],
    ["import", "model.zip", "--recipe", "gym-ppo"],
    ["ls", "."],
    ["report", "."],
    ["bench", "gym-ppo", "--smoke", "--seconds", "0.1"],
    ["verify", ".", "--segments", "1"],
    ["replay", ".", "--update", "1"],
    ["bisect", ".", "."],
    ["verify-files", "."],
    ["push", ".", "ada/run"],
    ["pull", "ada/run"],
    ["benchmark", "classic", "--plot"],
    ["sweep", "gym-ppo", "--space", "../space.yaml", "--wandb-sweep"],
    ["plan", "gym-ppo", "--smoke"],
    ["backtest", "prices.csv"],
    ["jobfile", "slurm", "--", "train", "gym-ppo"],
    ["doctor", "--procs", "2"],
    ["warmup"],
    ["check", "gym-ppo", "--steps", "20"],
    ["episodes", ".", "--out", "../data"],
    ["audit", "../script.py", "--procs", "2", "--steps", "1", "--step-timeout", "20"],
    ["prove", "gym-ppo", "--procs", "2", "--iterations", "1"],
]
NIGHTLY = (
    *("bench", "benchmark", "plan", "backtest", "doctor", "warmup", "check", "episodes", "fork", "play", "prove"),
    *("sweep", "audit", "jobfile", "export", "import"),
    *("verify", "verify-files", "replay", "bisect", "push", "pull"),
)
"""Commands that start their processes as another command above does."""


def is_slow(words):
    """Return whether the case runs nightly only. Training on two processes starts them as the resumed run does."""
    return words[0] in NIGHTLY or (words[0] == "train" and "--procs" in words)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with one checkpoint, next to modules that create a marker file when they are executed."""
    directory = tmp_path_factory.mktemp("foreign")
    words = ["train", "gym-ppo", "--smoke", f"run.runs_dir={directory}", "run.name=run", *SMALL]
    ended = command([*LOCKSTEP, *words], directory=directory, fresh=True)
    assert ended.code == 0, ended.output
    for name in MODULES:
        mark = directory / f"executed-{name}"
        (directory / "run" / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (directory / "script.py").write_text("import torch\n")
    (directory / "space.yaml").write_text("algo.gamma: [0.9, 0.99]\n")
    return directory / "run"


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.slow] * is_slow(words)) for words in CASES],
    ids=lambda words: "-".join(words[:4]),
)
def test_command_executes_nothing_in_the_current_directory(run, words):
    for start in ("fork", "spawn") if words[0] == "resume" and "--procs" in words else ("fork",):
        command([*LOCKSTEP, *words], directory=run, environment={"LOCKSTEP_START": start}, fresh=True)
        assert not list(run.parent.glob("executed-*"))


def test_markers_appear_if_python_imports_from_the_current_directory(run):
    command([sys.executable, "-c", "import numpy"], directory=run)
    (mark,) = run.parent.glob("executed-*")
    mark.unlink()


def test_cases_cover_every_command():
    assert {words[0] for words in CASES} == set(COMMANDS)


def test_recipe_file_imports_modules_from_its_own_directory(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "sizes.py").write_text("SAMPLES = 512\n")
    (tmp_path / "code" / "mine.py").write_text(
        "import sizes\nimport lockstep.recipes.gym_ppo as base\nclass Mine(base.GymPPO):\n    aliases = {}\n"
        "assert sizes.SAMPLES == 512\n"
    )
    words = ["train", "code/mine.py", "--smoke", "--procs", "2", "run.runs_dir=runs", *SMALL]
    ended = command([*LOCKSTEP, *words], directory=tmp_path, fresh=True)
    assert ended.code == 0, ended.output
