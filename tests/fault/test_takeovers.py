"""Two starts of one run: the newer takes over once it has loaded a checkpoint; until then the older one continues."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from slow_recipe import ITERATION, Paced, samples_of, set_pace

from helpers.multiprocess import command, together
from helpers.tiny_recipes import hash_of
from lockstep import run_reservation
from lockstep.checkpoint.lineage import list_checkpoints, newest_generation, read_claim
from lockstep.config import ConfigError, apply_overrides
from lockstep.io.jsonl import read_status

pytestmark = pytest.mark.distributed

LOCKSTEP = [sys.executable, "-m", "lockstep"]
RECIPE = Path(__file__).parent / "slow_recipe.py"
STALLED = """
import sys, time
from lockstep.cli import main
from lockstep.checkpoint.fencing import GenerationFence

choose = GenerationFence._select

def choose_and_stall(self):
    chosen = choose(self)
    time.sleep(2.0)
    return chosen

GenerationFence._select = choose_and_stall
sys.exit(main(["resume", sys.argv[1]]))
"""
FAILING = """
import sys
from lockstep.cli import main
from lockstep.checkpoint.manager import CheckpointManager

def fail(*arguments):
    raise ValueError("this checkpoint is not for me")

CheckpointManager._restore = fail
sys.exit(main(["resume", sys.argv[1]]))
"""
LATE = """
import sys, time
from pathlib import Path
from lockstep.cli import main
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.io.jsonl import read_status

restore = CheckpointManager.restore

def wait_and_restore(self, *arguments):
    while (Path(sys.argv[1]) / "heartbeats" / sys.argv[2]).exists():
        time.sleep(0.05)
    restore(self, *arguments)

CheckpointManager.restore = wait_and_restore
sys.exit(main(["resume", sys.argv[1]]))
"""
WAITING = """
import sys, time
from pathlib import Path
from lockstep.cli import main
from lockstep.checkpoint.lineage import read_claim
from lockstep.checkpoint.manager import CheckpointManager

run, restore = Path(sys.argv[1]), CheckpointManager.restore

def wait_and_restore(self, *arguments):
    if sys.argv[2] == "first":
        while len(list((run / "heartbeats").iterdir())) < 3:
            time.sleep(0.05)
    else:
        while "parent" not in read_claim(run / "checkpoints", 2):
            time.sleep(0.05)
    restore(self, *arguments)

CheckpointManager.restore = wait_and_restore
sys.exit(main(["resume", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    ended = command([*LOCKSTEP, "train", RECIPE, f"run.runs_dir={directory}", "run.name=run"])
    assert ended.code == 0, ended.output
    return hash_of(directory / "run")


@pytest.fixture
def training(tmp_path):
    """A run that trains slowly in the background, with two checkpoints; yields its process and its pace file."""
    pace = tmp_path / "pace"
    set_pace(pace, 0.2)
    line = [
        *LOCKSTEP,
        "train",
        str(RECIPE),
        f"run.runs_dir={tmp_path}",
        "run.name=run",
        f"task.pace={pace}",
        "run.keep_last=1",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 120
        while samples_of(tmp_path / "run") < 2 * ITERATION:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        set_pace(pace, 4)  # so that it still trains when the other one has loaded
        yield process, pace
        process.kill()


def test_slow_loading_start_takes_over_and_matches_undisturbed_run(tmp_path, training, undisturbed):
    older, pace = training
    words = [sys.executable, "-c", STALLED, str(tmp_path / "run")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as newer:
        deadline = time.monotonic() + 120
        while "parent" not in read_claim(tmp_path / "run" / "checkpoints", 2) and newer.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        set_pace(pace, 0)
        output, _ = newer.communicate(timeout=120)
    assert newer.returncode == 0, output
    output, _ = older.communicate(timeout=60)
    assert "started again" in output
    assert read_status(tmp_path / "run")["state"] == "finished"
    assert hash_of(tmp_path / "run") == undisturbed


def test_start_that_fails_to_load_does_not_stop_the_running_one(tmp_path, training, undisturbed):
    older, pace = training
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    failed = command([sys.executable, "-c", FAILING, tmp_path / "run"])
    assert failed.code != 0
    assert "this checkpoint is not for me" in failed.output
    assert newest_generation(tmp_path / "run" / "checkpoints") == 1
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    assert read_status(tmp_path / "run")["state"] == "running"
    set_pace(pace, 0)
    output, _ = older.communicate(timeout=120)
    assert older.returncode == 0, output
    assert hash_of(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_start_that_loads_after_the_running_one_has_finished_finds_its_files(tmp_path, training, undisturbed):
    older, pace = training
    heartbeats = tmp_path / "run" / "heartbeats"
    words = [sys.executable, "-c", LATE, str(tmp_path / "run"), next(heartbeats.iterdir()).name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as newer:
        deadline = time.monotonic() + 120
        while len(list(heartbeats.iterdir())) < 2 and newer.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        set_pace(pace, 0)
        output, _ = newer.communicate(timeout=120)
    assert newer.returncode == 0, output
    assert older.wait(60) == 0
    assert not heartbeats.exists()
    assert hash_of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("claims", [("first", "second"), pytest.param(("second", "first"), marks=pytest.mark.slow)])
def test_of_two_starts_that_load_at_once_the_last_to_claim_keeps_its_heartbeats(tmp_path, training, claims):
    heartbeats = tmp_path / "run" / "heartbeats"
    directories, known, started = {}, set(heartbeats.iterdir()), []
    try:
        for claim in claims:
            words = [sys.executable, "-c", WAITING, str(tmp_path / "run"), claim]
            with (tmp_path / claim).open("wb") as output:
                started.append(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT))
            wait_for(lambda: set(heartbeats.iterdir()) - known)
            (directories[claim],) = set(heartbeats.iterdir()) - known
            known.add(directories[claim])
        wait_for(lambda: all("hosts all 8 lanes" in (tmp_path / claim).read_text() for claim in claims))  # are loaded
        assert read_claim(tmp_path / "run" / "checkpoints", 3)["pid"] == started[claims.index("second")].pid
        assert directories["second"].is_dir()
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_kill_after_resume_from_older_checkpoint_deletes_nothing(tmp_path, undisturbed):
    line = [
        *LOCKSTEP,
        "train",
        RECIPE,
        f"run.runs_dir={tmp_path}",
        "run.name=run",
        "run.keep_last=3",
        "run.eval_every=none",
    ]
    assert command([*line, f"run.total_samples={8 * ITERATION}"]).code == 0
    run, back = tmp_path / "run", 6 * ITERATION
    before = list_checkpoints(run / "checkpoints")
    resume = [*LOCKSTEP, "resume", run, "--total-samples", str(24 * ITERATION)]
    killed = command([*resume, "--checkpoint", str(back)], environment={"LOCKSTEP_INJECT_FAULT": "0:learn:1"})
    assert killed.code == -9, killed.output
    assert list_checkpoints(run / "checkpoints") == before
    ended = command(resume)
    assert ended.code == 0, ended.output
    assert f"from {8 * ITERATION:,} samples" in (run / "logs" / "process-0.log").read_text()


# -- names -------------------------------------------------------------------------------------------------------------


def create_one(directory):
    run_reservation.run_path = lambda recipe: (
        Path(directory) / "paced-20261116-120000"
    )  # the same timestamp for all processes
    return str(run_reservation.create_run(apply_overrides(Paced(), {"run.runs_dir": directory}), "{}"))


def test_create_run_simultaneous_starts_get_distinct_directories(tmp_path):
    assert len(set(together(create_one, 8, str(tmp_path)))) == 8


@pytest.mark.parametrize("what", ["files", "link", "file"])
def test_create_run_refuses_a_path_that_is_not_an_empty_directory(tmp_path, what):
    project = tmp_path / "project"
    (project / "heartbeats").mkdir(parents=True)
    (project / "heartbeats" / "thesis.tex").write_text("years of work")
    if what == "link":
        (tmp_path / "run").symlink_to(project)
    elif what == "file":
        (tmp_path / "run").write_text("a file")
    name = "project" if what == "files" else "run"
    with pytest.raises(ConfigError, match="a new run needs an empty directory"):
        run_reservation.create_run(apply_overrides(Paced(), {"run.runs_dir": str(tmp_path), "run.name": name}), "{}")
    assert (project / "heartbeats" / "thesis.tex").read_text() == "years of work"


def test_create_run_accepts_an_empty_directory_once(tmp_path):
    (tmp_path / "run").mkdir()
    recipe = apply_overrides(Paced(), {"run.runs_dir": str(tmp_path), "run.name": "run"})
    assert run_reservation.create_run(recipe, "{}") == tmp_path / "run"
    with pytest.raises(ConfigError, match="needs an empty directory"):
        run_reservation.create_run(recipe, "{}")
