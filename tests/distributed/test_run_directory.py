"""A run writes one directory, however it is started and on any number of processes."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.multiprocess import command
from lockstep.checkpoint.format import verify
from lockstep.checkpoint.lineage import find, read_claim
from lockstep.cli import main
from lockstep.io.jsonl import METRICS, read_jsonl

pytestmark = pytest.mark.distributed

LOCKSTEP = [sys.executable, "-m", "lockstep"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TRAIN = ["train", "snake-ppo", "--smoke"]


@pytest.mark.parametrize(
    "words",
    [
        [*LOCKSTEP, *TRAIN],
        [*LOCKSTEP, *TRAIN, "--procs", "2"],
        pytest.param([*TORCHRUN, "-m", "lockstep", *TRAIN], marks=pytest.mark.slow),
    ],
    ids=["alone", "procs", "torchrun"],
)
def test_run_leaves_one_directory_that_tensorboard_can_read(words, tmp_path):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    ended = command(words, directory=home, environment={"TMPDIR": str(scratch)})
    assert ended.code == 0, ended.output

    assert [path.name for path in home.iterdir()] == ["runs"]
    (run,) = (home / "runs").iterdir()
    if "torch.distributed.run" not in words:  # torchrun leaves its log directory, Lockstep's launcher does not
        assert [path for path in scratch.iterdir() if not path.name.startswith("torchinductor")] == []
    assert ended.output.count("Done at 4,096 steps") == 1  # only the main process prints
    newest, notes = find(run / "checkpoints")
    assert (newest.samples, notes) == (4096, [])
    verify(run / "checkpoints" / str(newest))

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    returns = [(event.step, event.value) for event in board.Scalars("rollout/ep_return_mean")]
    lines = [line for line in read_jsonl(run / METRICS) if "rollout/ep_return_mean" in line]
    assert [step for step, _ in returns] == [line["samples"] for line in lines] == [1024, 2048, 3072, 4096]
    assert [value for _, value in returns] == pytest.approx([line["rollout/ep_return_mean"] for line in lines])
    assert [event.step for event in board.Scalars("eval/return_mean")] == [2048, 4096]

    processes = 1 if words == [*LOCKSTEP, *TRAIN] else 2
    assert read_claim(run / "checkpoints", 1)["processes"] == processes
    compared = [line["sync/update"] for line in lines if "sync/update" in line]
    assert len(compared) == (4 if processes == 2 else 0)
    assert main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Return of evaluations" in page
    assert ("in sync at update" if processes == 2 else "nothing to compare") in page


BROKEN = """
import os, gymnasium

class Broken(gymnasium.Env):
    def __init__(self, rank, render_mode=None):
        if os.environ.get("RANK", "0") == str(rank):
            raise RuntimeError("no engine")
        self.observation_space, self.action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return self.observation_space.low, {}

gymnasium.register("Broken-v0", entry_point=Broken)
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task.id", "Nothing-v1"], "is not a registered environment"),
        (["--task.id", "Nothing-v1", "--procs", "2"], "is not a registered environment"),
        (["--task.id", "broken.py:Broken-v0", "--task.env-kwargs", "rank", "0"], "no engine"),
        (["--task.id", "broken.py:Broken-v0", "--task.env-kwargs", "rank", "1", "--procs", "2"], "no engine"),
        (["--algo.encoder.kind", "cnn", "--procs", "2"], "are not images"),
    ],
)
def test_start_that_fails_before_training_leaves_no_directory(tmp_path, flags, words):
    (tmp_path / "broken.py").write_text(BROKEN)
    ended = command([*LOCKSTEP, "train", "gym-ppo", "--smoke", *flags], directory=tmp_path)
    assert ended.code != 0
    assert words in ended.output
    assert [*(tmp_path / "runs").iterdir()] == []
