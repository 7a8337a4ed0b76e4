"""Weights & Biases logging with the real library: offline files and unreachable servers."""

import socket
import sys

import pytest

from helpers.multiprocess import command
from lockstep.config import ConfigError, RunConfig
from lockstep.loggers.wandb_logger import WandbLog, require_wandb
from lockstep.recipes.gym_ppo import GymPPO

wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")

LOCKSTEP = [sys.executable, "-m", "lockstep"]
TRAIN = [*LOCKSTEP, "train", "gym-ppo", "--smoke", "--run.name", "a", "enable_wandb=true", "wandb_project=snakes"]


def history(run):
    """Return the history of a W&B run file by name: records in blocks of 32 KiB, as in LevelDB logs."""
    from wandb.proto import wandb_internal_pb2

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    data, place, record = path.read_bytes(), 7, b""
    names: dict[str, list[str]] = {}
    while place + 7 <= len(data):
        if 32_768 - place % 32_768 < 7:
            place += 32_768 - place % 32_768
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a complete record or its last part
            parsed = wandb_internal_pb2.Record.FromString(record)
            record = b""
            for item in parsed.history.item:
                names.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    return names


@pytest.mark.distributed
def test_offline_run_writes_files_that_wandb_reads(tmp_path):
    ended = command([*TRAIN, "--run.runs-dir", str(tmp_path), "wandb_mode=offline"])
    assert ended.code == 0, ended.output
    assert ended.output.count("`wandb sync` sends it") == 1
    found = history(tmp_path / "a")
    assert {"samples", "time/global_fps", "rollout/ep_return_mean", "eval/return_mean"} <= set(found)
    assert found["samples"] == sorted(found["samples"], key=float)
    assert (tmp_path / "a" / "wandb" / "id").read_text() in str(next((tmp_path / "a").glob("wandb/offline-run-*")))


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Write a log in this process with environment variables; return its messages and the content of its file."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    def log(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        opened = WandbLog(tmp_path, GymPPO(run=RunConfig(wandb=True, wandb_timeout=2.0)))
        opened.put(64, {"eval/return_mean": 2.5})
        opened.close()
        wandb.teardown()  # flushes the file, as the end of a process does
        return opened.notes, history(tmp_path)

    return log


@pytest.mark.distributed
def test_unresponsive_server_costs_timeout_and_one_message(logged, capfd):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (note,), found = logged(
            WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}", WANDB_API_KEY="secret" * 8
        )
    assert note.startswith("W&B cannot be used (")
    assert note.endswith("`wandb sync` sends it.")
    assert found["samples"] == ["64"]
    assert found["eval/return_mean"] == ["2.5"]
    assert "secret" not in "".join([note, *capfd.readouterr()])


def test_missing_api_key_logs_offline_without_prompt(logged):
    (note,), found = logged(WANDB_BASE_URL="http://127.0.0.1:9")
    assert "not logged in: run `wandb login` or set WANDB_API_KEY" in note
    assert found["eval/return_mean"] == ["2.5"]


def test_missing_wandb_library_error_names_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_wandb(RunConfig())
    with pytest.raises(ConfigError, match=r"lockstep-rl\[wandb\]"):
        require_wandb(RunConfig(wandb=True))
