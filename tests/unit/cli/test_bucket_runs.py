"""Commands with URLs of runs in a bucket instead of paths."""

import pytest

from helpers.bucket_fixtures import memory_url
from helpers.tiny_recipes import ITERATION, checkpoints_of, hash_of, tiny
from lockstep.bucket.client import Bucket
from lockstep.bucket.working_directory import CACHE, cache_directory
from lockstep.cli import main
from lockstep.cli.bucket_runs import with_local_copies
from lockstep.training_loop import train

__all__ = ["memory_url"]


@pytest.fixture(autouse=True)
def _directories(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_url(memory_url):
    """URL of a run of four iterations."""
    train(tiny(memory_url, keep_last=100, digest_every=1))
    return f"{memory_url}/run"


def test_commands_that_read_take_urls(run_url, memory_url, tmp_path, capsys):
    for arguments in (
        ["ls", memory_url],
        ["eval", run_url, "--episodes", "4"],
        ["report", run_url, "--out", "report.html"],
        ["export", run_url, "--to", "safetensors", "--out", "policy.safetensors"],
        ["verify-files", run_url],
        ["replay", run_url, "--update", "3"],
    ):
        assert main(arguments) == 0, capsys.readouterr()
    output = capsys.readouterr().out
    assert "512/512" in output
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "policy.safetensors").exists()
    assert list((tmp_path / "run" / "replays" / "update-3").iterdir())
    assert not list(cache_directory().iterdir())


def test_pulled_run_has_every_checkpoint_and_log(run_url, tmp_path, capsys):
    assert main(["pull", run_url]) == 0
    run = tmp_path / "runs" / "run"
    assert checkpoints_of(run) == [ITERATION * number for number in (1, 2, 3, 4)]
    assert (run / "tensorboard").is_dir()
    assert not list(run.glob(".*"))
    assert "already contains a run" in _error(capsys, ["pull", run_url])


def test_fork_and_resume_stay_in_the_bucket(run_url, memory_url, tmp_path, capsys):
    assert main(["fork", f"{run_url}@256", "run.name=fork", "--stop-at", "384"]) == 0
    assert main(["resume", f"{memory_url}/fork"]) == 0
    for name in ("run", "fork"):
        assert main(["pull", f"{memory_url}/{name}", "--out", name]) == 0
    assert hash_of(tmp_path / "fork") == hash_of(tmp_path / "run")
    assert main(["ls", memory_url, "--tree"]) == 0
    assert "fork of run at 256 samples" in " ".join(capsys.readouterr().out.split())
    assert "already contains a run" in _error(capsys, ["fork", run_url, "run.name=fork", "--total-samples", "1024"])
    assert main(["fork", f"{run_url}@256", "--create-only", "run.runs_dir=here"]) == 0
    assert len(list((tmp_path / "here").iterdir())) == 1
    assert not list(cache_directory().iterdir())


def test_weights_of_a_run_in_a_bucket_start_another_one(run_url, tmp_path, capsys):
    settings = ["run.total_samples=128", "run.eval_every=none", "task.size=4", "task.num_envs=16", "run.name=next"]
    network = ["algo.encoder.hidden_sizes=4", "algo.encoder.num_layers=1", "algo.encoder.out_features=8"]
    small = ["algo.rollout_steps=8", "algo.batch_size=64", "algo.epochs=1", "run.record_video=false"]
    words = ["train", "snake-ppo", "--init-from", f"{run_url}@256", *settings, *network, *small]
    assert main(words) == 0, capsys.readouterr()
    assert (tmp_path / "runs" / "next" / "checkpoints").is_dir()


def test_errors_name_the_url_and_the_fix(run_url, memory_url, capsys):
    assert f"{memory_url}/nothing is not a run, and contains none" in _error(capsys, ["ls", f"{memory_url}/nothing"])
    assert "is not a run" in _error(capsys, ["resume", f"{memory_url}/nothing"])
    assert f"{run_url} has made 8 updates" in _error(capsys, ["replay", run_url, "--update", "9"])
    assert "needs a directory" in _error(capsys, ["train", "gym-ppo", "--seeds", "2", f"run.runs_dir={memory_url}"])
    assert "contains a user or a password" in _error(capsys, ["eval", "s3://key:secret@bucket/run"])
    assert Bucket(memory_url).list().folders == ["run"]


def test_other_arguments_are_not_changed(run_url):
    words = ["--rdzv-endpoint", "n0:29500", "run.runs_dir=s3://bucket", "a://"]
    with with_local_copies("train", words) as changed:
        assert changed == words
    with with_local_copies("pull", [run_url]) as changed:
        assert changed == [run_url]
    with with_local_copies("eval", [f"--run={run_url}@128"]) as changed:
        assert changed[0].startswith(f"--run={cache_directory()}")
        assert changed[0].endswith("/run@128")


def _error(capsys, arguments):
    capsys.readouterr()
    assert main(arguments) == 2
    return " ".join(capsys.readouterr().err.split())
