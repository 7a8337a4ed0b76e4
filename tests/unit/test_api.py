"""The public Python API: train, resume, evaluate, prove and make from a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.config import ConfigError
from lockstep.run_results import RunEvents

SMALL = {
    "task": {"num_envs": 8, "size": 5},
    "algo": {"rollout_steps": 8, "batch_size": 64},
    "run": {"total_samples": 256, "eval_every": 128, "log_every": 64, "record_video": False},
}


def settings(directory, **run):
    return SMALL | {"run": SMALL["run"] | {"runs_dir": str(directory)} | run}


def script(path, text, *args):
    """Run a Python script in a separate process."""
    path.write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(path), *args], capture_output=True, text=True, timeout=300, env=environment, check=False
    )


def test_import_lockstep_exports_public_names_without_torch():
    text = "import lockstep, sys; assert 'torch' not in sys.modules; [getattr(lockstep, n) for n in lockstep.__all__]"
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_import_lockstep_stops_torch_threads_from_spinning(given, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    text = "import lockstep, os; print(os.environ['OMP_WAIT_POLICY'])"
    result = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment | ({"OMP_WAIT_POLICY": given} if given else {}),
    )
    assert result.stdout.strip() == expected


def test_train_returns_run_with_results(tmp_path):
    run = lockstep.train("snake-ppo", **settings(tmp_path))
    assert run.status == "finished"
    assert [line["samples"] for line in run.evaluations] == [128, 256]
    assert run.best in run.evaluations
    assert run.best["return_mean"] == max(line["return_mean"] for line in run.evaluations)
    assert [path.name[:12] for path in run.checkpoints][-1] == f"{256:012d}"
    observations = lockstep.make("snake-ppo", num_envs=8, size=5).observations()
    assert run.load().act(observations).shape == (8,)


def test_train_accepts_dotted_overrides_and_config_objects(tmp_path):
    task = lockstep.SnakeConfig(size=6, num_envs=8)
    dotted = {"algo.gamma": 0.5, "run.runs_dir": str(tmp_path), "run.name": "named"}
    run = lockstep.train("snake-ppo", smoke=True, overrides=dotted, task=task, run={"total_samples": 512})
    assert run.path == tmp_path / "named"
    recipe = run.load().recipe
    assert (recipe.algo.gamma, recipe.task.size, recipe.run.total_samples) == (0.5, 6, 512)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"overrides": {"algo.gama": 0.9}}, "Did you mean 'gamma'"),
        ({"task": {"num_envs": 3}}, "num_envs is 3"),
        ({"preset": "huge"}, "has no preset 'huge'"),
        ({"learning_rate": 1e-3}, "'learning_rate' is not a setting"),
    ],
)
def test_train_rejects_invalid_settings_and_creates_no_directory(tmp_path, keywords, message):
    with pytest.raises(ConfigError, match=message):
        lockstep.train("snake-ppo", smoke=True, **{"run": {"runs_dir": str(tmp_path / "runs")}} | keywords)
    assert not (tmp_path / "runs").exists()


def test_callbacks_receive_every_entry_once(tmp_path):
    logs, evaluations, saves = [], [], []
    run = lockstep.train(
        "snake-ppo",
        **settings(tmp_path, save_every=64),
        on_log=logs.append,
        on_evaluation=evaluations.append,
        on_checkpoint=saves.append,
    )
    assert [line["samples"] for line in logs] == [64, 128, 192, 256]
    assert evaluations == run.evaluations
    assert [save["samples"] for save in saves][-1] == 256
    assert all(json.dumps(line) for line in logs)  # plain data
    lockstep.resume(run, total_samples=384, on_log=logs.append)
    assert [line["samples"] for line in logs] == [64, 128, 192, 256, 320, 384]


def test_callback_exception_aborts_run(tmp_path):
    def stop(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lockstep.train("snake-ppo", **settings(tmp_path, name="run"), on_log=stop)
    assert lockstep.Run(tmp_path / "run").status == "failed"


def test_train_under_torchrun_is_rejected_before_run_directory_exists(tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="started by torchrun"):
        lockstep.train("snake-ppo", smoke=True, run={"runs_dir": str(tmp_path)})
    assert not list(tmp_path.iterdir())


def test_events_after_restart_are_reported_once(tmp_path):
    seen, log = [], tmp_path / "metrics.jsonl"
    events = RunEvents(tmp_path, seen.append, None, None)
    log.write_text('{"samples": 1}\n{"sampl\n{"samples": 2}\n{"sam')  # one line was cut by a kill
    events.poll()
    log.write_text('{"samples": 1}\n')  # the run is restarted from its checkpoint at 1
    events.poll()
    log.write_text('{"samples": 1}\n{"samples": 2}\n{"samples": 3}\n')
    events.poll()
    assert [line["samples"] for line in seen] == [1, 2, 3]


def test_evaluate_with_same_seed_gives_same_results(tmp_path):
    run = lockstep.train("snake-ppo", **settings(tmp_path))
    first = lockstep.evaluate(run, episodes=8)
    assert first == lockstep.evaluate(str(run.path), episodes=8)
    assert first["episodes"] == 8


def test_make_builds_same_environments_for_same_seed():
    one, same, other = (lockstep.make("snake-ppo", num_envs=4, size=5, seed=seed) for seed in (1, 1, 2))
    assert one.observations().equal(same.observations())
    assert not one.observations().equal(other.observations())
    assert lockstep.make(lockstep.SnakeConfig(size=7), num_envs=2).observations().shape == (2, 3, 7, 7)


GUARD = 'if __name__ == "__main__":\n    main()'
SCRIPT = """
import sys
import lockstep

def main():
    saves = []
    run = lockstep.train(
        "snake-ppo", smoke=True, procs=2, run={"runs_dir": sys.argv[1], "name": "run"}, on_checkpoint=saves.append
    )
    print("status", run.status, "saves", saves[-1]["samples"], "best", run.best["samples"])

GUARD
"""


@pytest.mark.distributed
def test_script_trains_on_two_processes(tmp_path):
    result = script(tmp_path / "job.py", SCRIPT.replace("GUARD", GUARD), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "status finished saves 4096 best" in result.stdout


RECIPE = """
import sys
from dataclasses import dataclass
import lockstep

@dataclass(frozen=True, kw_only=True)
class Mine(lockstep.Recipe):
    task: lockstep.SnakeConfig = lockstep.SnakeConfig(size=5, num_envs=8)
    algo: lockstep.PPOConfig = lockstep.PPOConfig(rollout_steps=8, batch_size=64)
    run: lockstep.RunConfig = lockstep.RunConfig(total_samples=128, eval_every=None, record_video=False)

def main():
    procs = int(sys.argv[2])
    run = lockstep.train(Mine, procs=procs, run={"runs_dir": sys.argv[1], "name": "run"})
    actions = run.load().act(lockstep.make(run).observations())
    print("status", run.status, "actions", actions.shape, "file", lockstep.Run(run.path).load().recipe.name)

GUARD
"""


@pytest.mark.distributed
@pytest.mark.parametrize("procs", ["1", "2"])
def test_script_recipe_trains_and_loads(tmp_path, procs):
    result = script(tmp_path / "job.py", RECIPE.replace("GUARD", GUARD), str(tmp_path), procs)
    assert result.returncode == 0, result.stderr
    assert f"status finished actions (8,) file {tmp_path / 'job.py'}" in result.stdout


@pytest.mark.distributed
def test_script_recipe_without_main_guard_is_rejected(tmp_path):
    result = script(
        tmp_path / "job.py", RECIPE.replace("GUARD", "main()").replace("int(sys.argv[2])", "2"), str(tmp_path)
    )
    assert result.returncode != 0
    assert 'if __name__ == "__main__":' in result.stderr


@pytest.mark.distributed
def test_failed_run_raises_with_cause(tmp_path):
    broken = RECIPE.replace("GUARD", GUARD).replace(
        "size=5, num_envs=8)",
        "size=5, num_envs=8)\n    if __name__ != '__main__':\n        lockstep.SnakeConfig(size=1)",
    )
    result = script(tmp_path / "job.py", broken, str(tmp_path), "2")
    assert result.returncode != 0
    assert "size is 1" in result.stderr
    assert not Path(tmp_path / "run").exists()


@pytest.mark.distributed
def test_prove_returns_record(tmp_path):
    record = lockstep.prove("snake-ppo", procs=[1, 2], **settings(tmp_path))
    assert record["verdict"] == "one agent"
