"""Several hosts whose network links can be cut: the result equals that of a single process."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from host_trials import ends_well, lose_a_host_and_get_it_back
from hosts import SKIP, Host, Job, hosts, until
from slow_recipe import ITERATION, samples_of, set_pace

from helpers.multiprocess import command, outcomes
from helpers.tiny_recipes import hash_of
from lockstep.checkpoint.lineage import list_checkpoints, parent_of

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).with_name("slow_recipe.py")


class Trial:
    """One run, and how to start its processes on a host."""

    def __init__(self, directory: Path, pace: float) -> None:
        self.run, self.pace = directory / "run", directory / "pace"
        set_pace(self.pace, pace)
        self._words = ["train", RECIPE, f"run.runs_dir={directory}", "run.name=run", f"task.pace={self.pace}"]

    def start(self, host: Host, nodes: str, meet_at: str = "n0") -> Job:
        """Start Lockstep's launcher, which detects interface and address."""
        words = [sys.executable, "-m", "lockstep", *self._words]
        return host.start([*words, "--nnodes", nodes, "--rdzv-endpoint", f"{meet_at}:29500", "--rdzv-id", "job"])

    def start_torchrun(self, host: Host, nodes: str, *settings: str) -> Job:
        """Start torchrun with the options that several hosts need, and settings of its rendezvous."""
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=n0:29500", f"--local-addr={host.address}"]
        words += ["--rdzv-conf", ",".join([f"is_host={int(host.number == 0)}", *settings]), "-m", "lockstep"]
        return host.start([*words, *self._words], {"GLOO_SOCKET_IFNAME": "eth0"})

    def reaches(self, iterations: int, *jobs: Job) -> None:
        """Wait until the run has saved the checkpoint of an iteration."""
        until(lambda: samples_of(self.run) >= iterations * ITERATION, f"iteration {iterations}", *jobs)

    @property
    def samples(self) -> int:
        return samples_of(self.run)

    def status(self) -> dict[str, object]:
        return json.loads((self.run / "status.json").read_text())


@pytest.mark.slow
def test_network_outage_of_three_seconds_does_not_restart_the_run(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0.1)
    with hosts(2) as (first, second):
        jobs = [trial.start(host, "2") for host in (first, second)]
        trial.reaches(2, *jobs)
        second.cut()
        time.sleep(1)
        stuck = samples_of(trial.run)
        time.sleep(2)
        assert samples_of(trial.run) == stuck, "the run continued: the link was not cut"
        second.mend()
        set_pace(trial.pace, 0)
        ends_well(*jobs)
        assert "Starting again" not in jobs[0].output + jobs[1].output
    assert hash_of(trial.run) == undisturbed_hash


@pytest.mark.slow
def test_torchrun_on_three_hosts_matches_undisturbed_run(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0)
    with hosts(3) as made:
        ends_well(*[trial.start_torchrun(host, "3") for host in made])
    assert hash_of(trial.run) == undisturbed_hash


@pytest.mark.slow  # test_bucket.py has the same with a bucket
def test_run_continues_without_a_lost_host_and_accepts_it_again(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0.2)
    with hosts(2) as (first, second):
        lose_a_host_and_get_it_back(trial, first, second)
    assert trial.status()["state"] == "finished"
    assert hash_of(trial.run) == undisturbed_hash


def check_older_half_stopped(older: Job, trial: Trial) -> None:
    """Check that the older half of a split job ended, and published nothing after it could see the newer one."""
    older.wait()
    assert "started again" in older.output
    last, parent = newest(trial.run, 1), parent_of(trial.run / "checkpoints", 2)
    assert last <= parent.samples + ITERATION, "it continued to publish"  # one save may be in progress at the claim


def newest(run: Path, generation: int) -> int:
    """Return the samples of the newest checkpoint of a generation."""
    return max((n.samples for n in list_checkpoints(run / "checkpoints") if n.generation == generation), default=0)


def test_split_job_only_the_newer_half_publishes(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0)
    with hosts(2) as (first, second):
        second.cut()
        older = trial.start(first, "1:2", meet_at=first.address)
        trial.reaches(2, older)
        set_pace(trial.pace, 4)  # so that it still runs when the other one starts
        newer = trial.start(second, "1:2", meet_at=second.address)  # same job and directory, separate rendezvous
        check_older_half_stopped(older, trial)
        assert older.process.returncode != 0
        set_pace(trial.pace, 0)
        ends_well(newer)
    assert hash_of(trial.run) == undisturbed_hash


@pytest.mark.slow  # as above, but torch itself causes the split
def test_job_split_by_torchrun_only_the_newer_half_publishes(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0)
    dangerous = ("keep_alive_interval=1", "keep_alive_max_attempt=2", "last_call_timeout=3")
    with hosts(2) as (first, second):
        older = trial.start_torchrun(first, "1:2", *dangerous)
        trial.reaches(2, older)
        set_pace(trial.pace, 4)
        newer = trial.start_torchrun(second, "1:2", *dangerous)  # considers the first host dead and starts without it
        check_older_half_stopped(older, trial)
        newer.wait()  # the rendezvous store ended with the first host, so it saves and stops
    assert newest(trial.run, 2)
    set_pace(trial.pace, 0)
    ended = command([sys.executable, "-m", "lockstep", "resume", trial.run])
    assert ended.code == 0, ended.output
    assert hash_of(trial.run) == undisturbed_hash


def leave_hosts_behind() -> None:
    with hosts(2) as (first, second):
        first.start(["sleep", "600"])
        second.cut()
        os.kill(os.getpid(), signal.SIGKILL)


def test_hosts_of_a_killed_test_are_removed():
    (killed,) = outcomes(leave_hosts_behind, 1)
    assert killed.error == "ended by SIGKILL"
    with hosts(2) as (first, second):
        assert not first.processes()
        server = first.start([sys.executable, "-m", "http.server", "29500"])
        reach = [sys.executable, "-c", "import socket; socket.create_connection(('n0', 29500), 5)"]
        until(lambda: second.start(reach).wait(20) == 0, "a way from the second host to the first", server)


def test_hosts_without_iproute_fails_unless_skip_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(SKIP, raising=False)
    with pytest.raises(pytest.fail.Exception, match="no network namespaces"), hosts(2):
        pass
    monkeypatch.setenv(SKIP, "1")
    with pytest.raises(pytest.skip.Exception, match="no network namespaces"), hosts(2):
        pass
