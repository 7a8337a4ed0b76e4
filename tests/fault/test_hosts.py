"""Several hosts, with cables that can be cut: the run that comes out is the run of a single process."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hosts import SKIP, Host, Job, hosts, until
from paced import ITERATION, samples_of

from lockstep.checkpoint.lineage import list_checkpoints, parent_of
from processes import command, outcomes
from tiny import hash_of

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).with_name("paced.py")


class Trial:
    """One run, and how to start a host's part of it."""

    def __init__(self, directory: Path, pace: float) -> None:
        self.run, self.pace = directory / "run", directory / "pace"
        self.set_pace(pace)
        self._words = ["train", RECIPE, f"run.runs_dir={directory}", "run.name=run", f"task.pace={self.pace}"]

    def set_pace(self, seconds: float) -> None:
        """How long each iteration takes from now on, at least."""
        beside = self.pace.with_suffix(".partial")
        beside.write_text(str(seconds))
        beside.rename(self.pace)

    def start(self, host: Host, nodes: str, meet_at: str = "n0") -> Job:
        """Our own launcher, which finds interface and address by itself."""
        words = [sys.executable, "-m", "lockstep", *self._words]
        return host.start([*words, "--nnodes", nodes, "--rdzv-endpoint", f"{meet_at}:29500", "--rdzv-id", "job"])

    def start_torchrun(self, host: Host, nodes: str, *settings: str) -> Job:
        """torchrun itself, with all that it must be told on several hosts, and settings of its rendezvous."""
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=n0:29500", f"--local-addr={host.address}"]
        words += ["--rdzv-conf", ",".join([f"is_host={int(host.number == 0)}", *settings]), "-m", "lockstep"]
        return host.start([*words, *self._words], {"GLOO_SOCKET_IFNAME": "eth0"})

    def reaches(self, iterations: int, *jobs: Job) -> None:
        """Wait until the run has saved after so many iterations."""
        until(lambda: samples_of(self.run) >= iterations * ITERATION, f"iteration {iterations}", *jobs)

    def status(self) -> dict[str, object]:
        return json.loads((self.run / "status.json").read_text())


def ends_well(*jobs: Job) -> None:
    for job in jobs:
        assert job.wait() == 0, "\n".join(f"-- {each.host.name}\n{each.output}" for each in jobs)


def test_a_cable_that_is_out_for_three_seconds_is_waited_for(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0.1)
    with hosts(2) as (first, second):
        jobs = [trial.start(host, "2") for host in (first, second)]
        trial.reaches(2, *jobs)
        second.cut()
        time.sleep(1)
        stuck = samples_of(trial.run)
        time.sleep(2)
        assert samples_of(trial.run) == stuck, "the run went on: the cable was not cut"
        second.mend()
        trial.set_pace(0)
        ends_well(*jobs)
        assert "Starting again" not in jobs[0].output + jobs[1].output
    assert hash_of(trial.run) == undisturbed_hash


@pytest.mark.slow
def test_three_hosts_under_torchrun_share_eight_lanes(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0)
    with hosts(3) as made:
        ends_well(*[trial.start_torchrun(host, "3") for host in made])
    assert hash_of(trial.run) == undisturbed_hash


def test_a_host_that_is_lost_is_done_without_and_one_that_comes_back_joins(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0.2)
    with hosts(2) as (first, second):
        jobs = [trial.start(host, "1:2") for host in (first, second)]
        trial.reaches(2, *jobs)
        assert trial.status()["processes"] == 2
        second.cut()
        until(lambda: trial.status()["processes"] == 1, "the first host goes on alone", *jobs)
        before = samples_of(trial.run)
        trial.reaches(before // ITERATION + 2, *jobs)
        trial.set_pace(4)  # so that there is a run left for it to come back to
        second.power_off()
        second.mend()
        jobs[1] = trial.start(second, "1:2")
        until(lambda: trial.status()["processes"] == 2, "the second host has joined", *jobs)
        trial.set_pace(0)
        ends_well(*jobs)
    assert trial.status()["state"] == "finished"
    assert hash_of(trial.run) == undisturbed_hash


def has_said_why_it_stopped(older: Job, trial: Trial) -> None:
    """The older half of a split job has ended, and published nothing once it could know of the newer one."""
    older.wait()
    assert "started anew" in older.output
    last, parent = newest(trial.run, 1), parent_of(trial.run / "checkpoints", 2)
    assert last <= parent.samples + ITERATION, "it went on publishing"  # it may have been about to, at the claim


def newest(run: Path, generation: int) -> int:
    """How far one start of a run has come, by its checkpoints."""
    return max((n.samples for n in list_checkpoints(run / "checkpoints") if n.generation == generation), default=0)


def test_of_two_halves_that_do_not_see_each_other_one_publishes_and_the_other_says_why_not(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0)
    with hosts(2) as (first, second):
        second.cut()
        older = trial.start(first, "1:2", meet_at=first.address)
        trial.reaches(2, older)
        trial.set_pace(4)  # so that it is still there when the other begins
        newer = trial.start(second, "1:2", meet_at=second.address)  # the same job, the same directory, its own meeting
        has_said_why_it_stopped(older, trial)
        assert older.process.returncode != 0
        trial.set_pace(0)
        ends_well(newer)
    assert hash_of(trial.run) == undisturbed_hash


@pytest.mark.slow  # the test above shows the same; this one shows that torch brings it about by itself
def test_a_job_that_torch_splits_in_two_has_one_half_that_publishes(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path, pace=0)
    dangerous = ("keep_alive_interval=1", "keep_alive_max_attempt=2", "last_call_timeout=3")
    with hosts(2) as (first, second):
        older = trial.start_torchrun(first, "1:2", *dangerous)
        trial.reaches(2, older)
        trial.set_pace(4)
        newer = trial.start_torchrun(second, "1:2", *dangerous)  # takes the first host for dead, and begins without it
        has_said_why_it_stopped(older, trial)
        newer.wait()  # the meeting place went with the first host, so it saves and stops
    assert newest(trial.run, 2)
    trial.set_pace(0)
    ended = command([sys.executable, "-m", "lockstep", "resume", trial.run])
    assert ended.code == 0, ended.output
    assert hash_of(trial.run) == undisturbed_hash


def leave_hosts_behind() -> None:
    with hosts(2) as (first, second):
        first.start(["sleep", "600"])
        second.cut()
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_test_left_of_its_hosts_is_cleared_away():
    (killed,) = outcomes(leave_hosts_behind, 1)
    assert killed.error == "ended by SIGKILL"
    with hosts(2) as (first, second):
        assert not first.processes()
        server = first.start([sys.executable, "-m", "http.server", "29500"])
        reach = [sys.executable, "-c", "import socket; socket.create_connection(('n0', 29500), 5)"]
        until(lambda: second.start(reach).wait(20) == 0, "a way from the second host to the first", server)


def test_where_no_hosts_can_be_made_tests_fail_unless_asked_to_skip(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(SKIP, raising=False)
    with pytest.raises(pytest.fail.Exception, match="no network namespaces"), hosts(2):
        pass
    monkeypatch.setenv(SKIP, "1")
    with pytest.raises(pytest.skip.Exception, match="no network namespaces"), hosts(2):
        pass
