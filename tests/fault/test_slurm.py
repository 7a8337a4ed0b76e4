"""A preempted SLURM job saves, requeues itself, resumes, and ends with the hash of an undisturbed run."""

import json
from pathlib import Path

import pytest
from slow_recipe import ITERATION, samples_of, set_pace
from slurm import SKIP, cluster

from helpers.tiny_recipes import hash_of

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).with_name("slow_recipe.py")
SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"


def test_preempted_slurm_job_requeues_and_matches_undisturbed_run(tmp_path, undisturbed_hash):
    pace = tmp_path / "pace"
    set_pace(pace, 0.5)
    with cluster(tmp_path) as slurm:
        options = ["--gpus-per-node=0", "--cpus-per-task=1"]
        job = slurm.submit(*options, SCRIPT, RECIPE, f"run.runs_dir={tmp_path}", f"task.pace={pace}")
        run = tmp_path / f"slurm-{job}"
        slurm.until(job, lambda: samples_of(run) >= 2 * ITERATION, "two iterations")
        slurm.run("scancel", "--signal=USR1", "--batch", job)
        slurm.until(job, lambda: slurm.ask(job, "Restarts") == "1", "queued again")
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "preempted", slurm.output(job)
        assert samples_of(run) < 24 * ITERATION, "the run finished before it was preempted"
        set_pace(pace, 0)
        slurm.until(job, lambda: slurm.ask(job, "JobState") == "COMPLETED", "the end")
    assert hash_of(run) == undisturbed_hash


def test_cluster_without_slurm_fails_unless_skip_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(SKIP, raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"slurmctld.* not found"), cluster(tmp_path):
        pass
    monkeypatch.setenv(SKIP, "1")
    with pytest.raises(pytest.skip.Exception, match=r"slurmctld.* not found"), cluster(tmp_path):
        pass
