"""Automatic restart from the last checkpoint after a process dies, with the lanes partitioned again."""

import json
import sys
from types import SimpleNamespace

import pytest
from run_helpers import LOCKSTEP, words

from helpers.multiprocess import command, free_port
from helpers.tiny_recipes import hash_of
from lockstep.config import ConfigError
from lockstep.io.jsonl import STATUS
from lockstep.launch.failures import summarize_failures
from lockstep.launch.rendezvous import parse_nodes

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kill", "processes"), [pytest.param("1:learn:3", 3, marks=pytest.mark.slow), ("0:collect:2", 2), ("2:save:2", 3)]
)
def test_restart_after_kill_names_the_process_and_matches_undisturbed_run(tmp_path, undisturbed, kill, processes):
    line = [*LOCKSTEP, *words(tmp_path), "--procs", str(processes), "--max-restarts", "1"]
    ended = command(line, environment={"LOCKSTEP_INJECT_FAULT": kill})
    assert ended.code == 0, ended.output
    assert f"process {kill[0]} of {processes} failed first: it was ended by SIGKILL." in ended.output
    assert "Starting again from the last checkpoint (1 of 1 restarts left)." in ended.output
    status = json.loads((tmp_path / "run" / STATUS).read_text())
    hours = status["process_hours"]
    assert status["state"] == "finished"
    assert hours["newest_start"]["generation"] == 2
    assert hours["used"] > processes * hours["newest_start"]["seconds"] / 3600  # both starts
    assert hash_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("store", [pytest.param("made for each start", marks=pytest.mark.slow), "kept by torchrun"])
def test_torchrun_restart_after_kill_matches_undisturbed_run(tmp_path, undisturbed, store):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    environment = {"LOCKSTEP_INJECT_FAULT": "1:learn:3"}
    if store == "kept by torchrun":
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    else:
        torchrun += ["--standalone"]
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ended = command([*torchrun, "-m", "lockstep", *words(tmp_path)], environment=environment)
    assert ended.code == 0, ended.output
    assert hash_of(tmp_path / "run") == undisturbed


def test_kill_without_restarts_left_names_the_first_failed_process(tmp_path):
    line = [*LOCKSTEP, *words(tmp_path), "--procs", "2", "--max-restarts", "0"]
    ended = command(line, environment={"LOCKSTEP_INJECT_FAULT": "1:learn:2"})
    assert ended.code == 1
    assert "process 1 of 2 failed first: it was ended by SIGKILL." in ended.output


def test_exception_in_user_code_is_not_restarted(tmp_path):
    recipe = tmp_path / "broken.py"
    recipe.write_text(
        "import lockstep.recipes.gym_ppo as base\n"
        "from lockstep.tasks.gym.env import GymEnvs\n"
        "def broken(self, action):\n"
        "    raise ValueError('the environment is broken')\n"
        "GymEnvs.step = broken\n"
        "class Broken(base.GymPPO): ...\n"
    )
    ended = command([*LOCKSTEP, "train", recipe, "--smoke", "--procs", "2", f"run.runs_dir={tmp_path}"])
    assert ended.code == 1
    assert "ValueError: the environment is broken" in ended.output
    assert "Starting again" not in ended.output


KILLED_BY_LAUNCHER = 7


def failure(code, kind="", words="", at=0.0, pid=1):
    message = {"message": f"{kind}: {words}", "extraInfo": {"py_callstack": ""}}
    data = {"message": message} if kind else None
    return SimpleNamespace(exitcode=code, pid=pid, timestamp=at, error_file_data=data, message=f"{kind}: {words}")


@pytest.mark.parametrize(
    ("failures", "words", "machine"),
    [
        (
            {0: failure(1, "PeerLostError", "gone", 1.0), 1: failure(-9, at=2.0)},
            "process 1 of 2 failed first: it was",
            True,
        ),
        (
            {0: failure(143, at=1.0), 1: failure(1, "ValueError", "bad", 2.0)},
            "process 1 of 2 failed first: Value",
            False,
        ),
        ({0: failure(-15), 1: failure(1, "ValueError", "bad", 2.0)}, "process 1 of 2 failed first: V", False),
        ({0: failure(2, "ConfigError", "no such thing")}, "no such thing", False),
        ({0: failure(1, "CollectiveTimeoutError", "process 1 did not come")}, "process 1 did not come", True),
        ({0: failure(1, "PeerLostError", "gone"), 1: failure(143)}, "process 0 of 2 failed first: PeerLostError", True),
        # The process recorded its own error before the launcher ended it, although the other process exited first.
        (
            {0: failure(1, "PeerLostError", "gone"), 1: failure(-15, "ValueError", "bad")},
            "process 1 of 2 failed first: V",
            False,
        ),
        (
            {0: failure(1, "PeerLostError", "gone"), 1: failure(143, "ValueError", "bad")},
            "process 1 of 2 failed first: V",
            False,
        ),
        (
            {0: failure(1, "PeerLostError", "gone"), 1: failure(-9, "ValueError", "bad")},
            "process 1 of 2 failed first: V",
            False,
        ),
        # A stopped process that the launcher killed does not count as killed by another program.
        (
            {0: failure(1, "CollectiveTimeoutError", "process 1 did not come"), 1: failure(-9, pid=KILLED_BY_LAUNCHER)},
            "process 1 did not come",
            True,
        ),
    ],
)
def test_summarize_failures_blames_the_process_that_failed_on_its_own(failures, words, machine):
    sentence, blame = summarize_failures(failures, 2, killed_by_launcher={KILLED_BY_LAUNCHER})
    assert sentence.startswith(words)
    assert blame is machine


@pytest.mark.parametrize(("text", "nodes"), [("2", (2, 2)), ("1:4", (1, 4))])
def test_parse_nodes_accepts_a_number_or_a_range(text, nodes):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:b"])
def test_parse_nodes_rejects_other_values(text):
    with pytest.raises(ConfigError, match="--nnodes"):
        parse_nodes(text)
