"""User secrets are not written: a run stores neither environment variables nor the command line."""

import sys

import pytest

from helpers.multiprocess import command

pytestmark = pytest.mark.distributed

SECRETS = {
    "WANDB_API_KEY": "hunter2-wandb",
    "AWS_SECRET_ACCESS_KEY": "hunter2-aws",
    "HF_TOKEN": "hunter2-hf",
    "DATABASE_URL": "postgres://me:hunter2-base@host/runs",
}


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_stores_no_environment_variables_and_no_arguments(tmp_path, processes):
    (tmp_path / "hunter2-folder").mkdir()
    (tmp_path / "hunter2-folder" / "mine.yaml").write_text("run: {seed: 3}")
    words = [sys.executable, "-m", "lockstep", "train", "gym-ppo", "--smoke", "--procs", processes]
    words += ["--config", "hunter2-folder/mine.yaml", "run.name=run", "run.runs_dir=runs"]
    ended = command(list(map(str, words)), directory=tmp_path, environment=SECRETS)
    assert ended.code == 0, ended.output
    assert "hunter2" not in ended.output
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "manifest.json", "train_state.json"} <= {path.name for path in files}
    assert any("tfevents" in path.name for path in files)
    for path in files:
        assert b"hunter2" not in path.read_bytes(), path
    assert "seed: 3" in (tmp_path / "runs" / "run" / "config.yaml").read_text()
