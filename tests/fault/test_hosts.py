"""Several hosts, with cables that can be cut: the run that comes out is the run of a single process."""

import sys
import time
from pathlib import Path

import pytest
from hosts import Host, hosts, until
from paced import ITERATION

from lockstep.run.lineage import published
from tiny import hash_of

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).with_name("paced.py")


class Trial:
    """One run in a directory of its own, and how to start a host's part of it."""

    def __init__(self, directory: Path) -> None:
        self.run, self.pace = directory / "run", directory / "pace"
        self.pace.write_text("0")

    def words(self) -> list[str]:
        return ["train", str(RECIPE), f"run.dir={self.run.parent}", "run.name=run", f"task.pace={self.pace}"]

    def under_torchrun(self, host: Host, count: int, processes: int = 1) -> list[str]:
        """torchrun itself, with all that it needs on several hosts."""
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--nproc-per-node={processes}"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=n0:29500", f"--local-addr={host.address}"]
        return [*words, f"--rdzv-conf=is_host={int(host.number == 0)}", "-m", "lockstep", *self.words()]

    def samples(self) -> int:
        """How far the run has come, by its newest checkpoint."""
        checkpoints = self.run / "checkpoints"
        names = published(checkpoints) if checkpoints.is_dir() else []
        return max((name.samples for name in names), default=0)


def test_a_cable_that_is_out_for_three_seconds_is_waited_for(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path)
    trial.pace.write_text("0.1")
    with hosts(2) as (first, second):
        variables = {"GLOO_SOCKET_IFNAME": "eth0"}
        jobs = [host.start(trial.under_torchrun(host, 2), variables) for host in (first, second)]
        until(lambda: trial.samples() >= 4 * ITERATION, 60, "the first iterations", *jobs)
        second.cut()
        time.sleep(1)
        stuck = trial.samples()
        time.sleep(2)
        assert trial.samples() == stuck, "the run went on: the cable was not cut"
        second.mend()
        assert [job.wait(60) for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    assert hash_of(trial.run) == undisturbed_hash


def test_three_hosts_share_eight_lanes(tmp_path, undisturbed_hash):
    trial = Trial(tmp_path)
    with hosts(3) as made:
        jobs = [host.start(trial.under_torchrun(host, 3), {"GLOO_SOCKET_IFNAME": "eth0"}) for host in made]
        assert [job.wait(90) for job in jobs] == [0, 0, 0], jobs[0].output
    assert hash_of(trial.run) == undisturbed_hash
