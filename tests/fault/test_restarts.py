"""A process dies and all start again by themselves, from the last checkpoint, with the lanes dealt anew."""

import json
import sys
from types import SimpleNamespace

import pytest
from runs import LOCKSTEP, words

from lockstep.config import ConfigError
from lockstep.io.jsonl import STATUS
from lockstep.launch.failures import summarize_failures
from lockstep.launch.rendezvous import parse_nodes
from processes import command, free_port
from tiny import hash_of

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kill", "processes"), [pytest.param("1:learn:3", 3, marks=pytest.mark.slow), ("0:collect:2", 2), ("2:save:2", 3)]
)
def test_a_killed_process_is_named_and_all_go_on(tmp_path, undisturbed, kill, processes):
    line = [*LOCKSTEP, *words(tmp_path), "--procs", str(processes), "--max-restarts", "1"]
    ended = command(line, environment={"LOCKSTEP_INJECT_FAULT": kill})
    assert ended.code == 0, ended.output
    assert f"process {kill[0]} of {processes} failed first: it was ended by SIGKILL." in ended.output
    assert "Starting again from the last checkpoint (1 of 1 restarts left)." in ended.output
    assert json.loads((tmp_path / "run" / STATUS).read_text())["state"] == "finished"
    assert hash_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("store", [pytest.param("made for each start", marks=pytest.mark.slow), "kept by torchrun"])
def test_torchrun_restarts_a_run_as_well(tmp_path, undisturbed, store):
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


def test_a_run_that_was_killed_too_often_says_who_was_first(tmp_path):
    line = [*LOCKSTEP, *words(tmp_path), "--procs", "2", "--max-restarts", "0"]
    ended = command(line, environment={"LOCKSTEP_INJECT_FAULT": "1:learn:2"})
    assert ended.code == 1
    assert "process 1 of 2 failed first: it was ended by SIGKILL." in ended.output


def test_what_would_fail_in_the_same_way_again_is_not_tried_again(tmp_path):
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


DISMISSED = 7


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
        # Recorded before the launcher ended it, because its own failure had the other one end first.
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
        # A stopped process that the launcher killed is not one that somebody else killed.
        (
            {0: failure(1, "CollectiveTimeoutError", "process 1 did not come"), 1: failure(-9, pid=DISMISSED)},
            "process 1 did not come",
            True,
        ),
    ],
)
def test_the_cause_is_whoever_failed_by_itself(failures, words, machine):
    sentence, blame = summarize_failures(failures, 2, dismissed={DISMISSED})
    assert sentence.startswith(words)
    assert blame is machine


@pytest.mark.parametrize(("text", "nodes"), [("2", (2, 2)), ("1:4", (1, 4))])
def test_hosts_are_a_number_or_a_range(text, nodes):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:b"])
def test_other_words_for_hosts_are_refused(text):
    with pytest.raises(ConfigError, match="--nnodes"):
        parse_nodes(text)
