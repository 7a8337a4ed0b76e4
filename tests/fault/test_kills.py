"""A killed and resumed run matches the uninterrupted run, wherever it was killed. Processes are killed by SIGKILL."""

import shutil

import pytest
from run_helpers import SAMPLES, errors, run, run_killed

from helpers.tiny_recipes import hash_of
from lockstep.checkpoint.lineage import lineage
from lockstep.launch.launcher import launch_captured

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("kill", "processes", "resumed_on"),
    [
        pytest.param("0:collect:3", 1, 2, marks=pytest.mark.slow),
        ("1:reduce:9", 2, 1),
        pytest.param("0:evaluate:1", 2, 3, marks=pytest.mark.slow),
        ("2:learn:2", 3, 2),
        ("0:save:2", 1, 2),  # the main process, after its lanes and before the rest
        ("1:save:2", 3, 1),  # another process, so that the main process waits until its timeout
        ("0:publish:2", 2, 3),  # everything written, nothing published
        ("0:save:1", 2, 1),  # before the first checkpoint
    ],
)
def test_resume_after_kill_matches_undisturbed_run(tmp_path, undisturbed, kill, processes, resumed_on):
    victim = int(kill.partition(":")[0])
    killed = run(tmp_path, "run", processes, kill=kill)
    assert killed[victim].error == "ended by SIGKILL"
    assert not errors(run(tmp_path, "run", resumed_on, resume=True))
    assert hash_of(tmp_path / "run") == undisturbed


def test_resume_after_repeated_kills_matches_undisturbed_run(tmp_path, undisturbed):
    plan = [(3, "0:learn:2"), (2, "1:save:2"), (4, "3:reduce:7"), (1, "0:collect:1")]
    for attempt, (processes, kill) in enumerate(plan):
        assert "SIGKILL" in errors(run(tmp_path, "run", processes, resume=attempt > 0, kill=kill))
    assert not errors(run(tmp_path, "run", 2, resume=True))
    assert hash_of(tmp_path / "run") == undisturbed


def test_resume_removes_partial_checkpoints(tmp_path):
    run(tmp_path, "run", 1, kill="0:save:2")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert list(checkpoints.glob(".*.partial"))
    assert not errors(run(tmp_path, "run", 1, resume=True))
    assert not list(checkpoints.glob(".*.partial"))


def test_late_checkpoint_of_an_older_generation_is_not_in_the_lineage(tmp_path):
    run_killed(tmp_path, "run", 1, kill="0:learn:4")
    checkpoints = tmp_path / "run" / "checkpoints"
    old = lineage(checkpoints)[0]
    assert not errors(run(tmp_path, "run", 1, resume=True))
    before = hash_of(tmp_path / "run")
    late = checkpoints / f"{100 * SAMPLES:012d}-g{old.generation:04d}"
    shutil.copytree(checkpoints / str(lineage(checkpoints)[0]), late)  # undamaged, more samples, older generation
    assert late.name not in map(str, lineage(checkpoints))
    assert hash_of(tmp_path / "run") == before


def test_launch_captured_names_the_killed_process(tmp_path):
    words = ["gym-ppo", "--smoke", f"run.runs_dir={tmp_path}", "run.name=run"]
    cause = launch_captured(["train", *words], 2, {"LOCKSTEP_INJECT_FAULT": "1:learn:2"})
    assert cause.startswith(
        "process 1 of 2 failed first: it was ended by SIGKILL. If no user sent it, the machine ran out of memory"
    )
