"""A SLURM job that is preempted saves, queues itself again, goes on, and ends as if nothing had happened."""

import json
from pathlib import Path

import pytest
from paced import ITERATION, samples_of
from slurm import SKIP, cluster

from tiny import hash_of

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).with_name("paced.py")
SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"


def test_a_preempted_job_queues_itself_again_and_ends_with_the_undisturbed_hash(tmp_path, undisturbed_hash):
    pace = tmp_path / "pace"
    pace.write_text("0.5")
    with cluster(tmp_path) as slurm:
        options = ["--gpus-per-node=0", "--cpus-per-task=1"]
        job = slurm.submit(*options, SCRIPT, RECIPE, f"run.runs_dir={tmp_path}", f"task.pace={pace}")
        run = tmp_path / f"slurm-{job}"
        slurm.until(job, lambda: samples_of(run) >= 2 * ITERATION, "two iterations")
        slurm.run("scancel", "--signal=USR1", "--batch", job)
        slurm.until(job, lambda: slurm.ask(job, "Restarts") == "1", "queued again")
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "preempted", slurm.output(job)
        assert samples_of(run) < 24 * ITERATION, "it was over before it was preempted"
        pace.write_text("0")
        slurm.until(job, lambda: slurm.ask(job, "JobState") == "COMPLETED", "the end")
    assert hash_of(run) == undisturbed_hash


def test_where_there_is_no_slurm_tests_fail_unless_asked_to_skip(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(SKIP, raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"slurmctld.* not found"), cluster(tmp_path):
        pass
    monkeypatch.setenv(SKIP, "1")
    with pytest.raises(pytest.skip.Exception, match=r"slurmctld.* not found"), cluster(tmp_path):
        pass
