"""Runs in a bucket on a real S3 server: killed processes, a server that fails, and hosts without a common disk."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from host_trials import ends_well, lose_a_host_and_get_it_back
from hosts import Host, Job, hosts, until
from slow_recipe import ITERATION, set_pace

from helpers.bucket_fixtures import s3, s3_server
from helpers.multiprocess import command
from helpers.s3_server import CREDENTIALS
from helpers.tiny_recipes import hash_of
from lockstep.bucket.client import Bucket
from lockstep.bucket.working_directory import URL_FILE
from lockstep.bucket_copy import copy_run
from lockstep.checkpoint.bucket_disk import BucketDisk
from lockstep.checkpoint.lineage import list_checkpoints
from lockstep.checkpoint.naming import CheckpointName
from lockstep.launch.hang_report import write_report

pytestmark = pytest.mark.distributed

RECIPE = Path(__file__).with_name("slow_recipe.py")
LOCKSTEP = [sys.executable, "-m", "lockstep"]
__all__ = ["s3", "s3_server"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))


@contextmanager
def background(words):
    """Run a command in a session of its own, and end it with all its processes at the end of the block."""
    command = [str(word) for word in words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, start_new_session=True, **streams) as process:
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def samples_in(url):
    disk = BucketDisk(Bucket(url), Path("/nowhere"))
    return max((name.samples for name in list_checkpoints(disk.directory, disk)), default=0)


def hash_in_bucket(url, directory):
    directory.mkdir()
    copy_run(url, directory, "all")
    return hash_of(directory)


def test_run_killed_on_two_processes_resumes_on_one_without_its_local_files(s3, tmp_path, undisturbed_hash):
    pace, url = tmp_path / "pace", f"{s3.url}/runs/run"
    set_pace(pace, 0.1)
    words = [*LOCKSTEP, "train", RECIPE, f"run.runs_dir={s3.url}/runs", "run.name=run", f"task.pace={pace}"]
    with background([*words, "--procs", "2"]) as training:
        until(lambda: samples_in(url) >= 3 * ITERATION, "three checkpoints")
        os.killpg(training.pid, signal.SIGKILL)
    (tmp_path / "cache").rename(tmp_path / "lost")
    set_pace(pace, 0)
    ended = command([*LOCKSTEP, "resume", url])
    assert ended.code == 0, ended.output
    assert f"{url}" in ended.output
    assert hash_in_bucket(url, tmp_path / "copy") == undisturbed_hash
    assert not list((tmp_path / "cache").iterdir())
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode()
    assert not any(secret in path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file())
    assert secret.decode() not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["error", "no credentials"])
def test_bucket_that_fails_for_a_time_costs_checkpoints_and_not_the_run(s3, tmp_path, undisturbed_hash, fault):
    pace, url = tmp_path / "pace", f"{s3.url}/runs/run"
    set_pace(pace, 0.1)
    words = [*LOCKSTEP, "train", RECIPE, f"run.runs_dir={s3.url}/runs", "run.name=run", f"task.pace={pace}"]
    with background(words) as training:
        until(lambda: samples_in(url) >= 2 * ITERATION, "two checkpoints")
        before = samples_in(url)
        s3.fault = lambda request: fault if request.method in ("PUT", "DELETE") else ""
        time.sleep(3)
        assert samples_in(url) <= before + ITERATION
        s3.fault = lambda request: ""
        set_pace(pace, 0)
        output, _ = training.communicate(timeout=240)
    assert training.returncode == 0, output
    assert "Training continues, and the next save tries again" in output
    assert hash_in_bucket(url, tmp_path / "copy") == undisturbed_hash


class Trial:
    """A run of several hosts whose bucket is on the last of them. Each host has files of its own."""

    def __init__(self, directory: Path, pace: float, server: Host) -> None:
        self.directory, self.pace = directory, directory / "pace"
        set_pace(self.pace, pace)
        self.objects = directory / "objects" / "bucket" / "runs" / "run"
        """The objects of the run, as the server records them."""
        tests = str(Path(__file__).parents[1])
        words = [sys.executable, "-m", "helpers.s3_server", "9000", "bucket", directory / "objects"]
        self.server = server.start(words, {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])})
        until(lambda: "s3://bucket" in self.server.output, "the server is ready", self.server)
        self.environment = {"AWS_ENDPOINT_URL": f"http://{server.name}:9000", "AWS_DEFAULT_REGION": "us-east-1"}
        self.environment |= CREDENTIALS
        self._words = ["train", RECIPE, "run.runs_dir=s3://bucket/runs", "run.name=run", f"task.pace={self.pace}"]

    def start(self, host: Host, nodes: str, meet_at: str = "n0") -> Job:
        words = [*LOCKSTEP, *self._words, "--nnodes", nodes, "--rdzv-endpoint", f"{meet_at}:29500", "--rdzv-id", "job"]
        return host.start(words, self.environment | {"LOCKSTEP_CACHE_DIR": str(self.directory / host.name)})

    def checkpoints(self) -> list[CheckpointName]:
        names = (path.stem for path in (self.objects / "checkpoints").glob("*.json"))
        return sorted(filter(None, map(CheckpointName.parse, names)))

    @property
    def samples(self) -> int:
        return max((name.samples for name in self.checkpoints()), default=0)

    def reaches(self, iterations: int, *jobs: Job) -> None:
        until(lambda: self.samples >= iterations * ITERATION, f"iteration {iterations}", *jobs)

    def status(self) -> dict[str, object]:
        return json.loads((self.objects / "status.json").read_text())

    def hash(self) -> str:
        """Return the hash of the run, read from a copy of the objects in memory."""
        url = f"memory://{uuid.uuid4().hex}/run"
        for path in self.objects.rglob("*"):
            if path.is_file():
                Bucket(url).put(path.relative_to(self.objects).as_posix(), path.read_bytes())
        try:
            return hash_in_bucket(url, self.directory / uuid.uuid4().hex)
        finally:
            MemoryFileSystem.store.clear()


def test_hosts_without_a_common_disk_lose_one_and_get_it_back(tmp_path, undisturbed_hash):
    with hosts(3) as (first, second, third):
        trial = Trial(tmp_path, 0.2, third)
        lose_a_host_and_get_it_back(trial, first, second)
    assert trial.status()["state"] == "finished"
    assert trial.hash() == undisturbed_hash
    logs = {path.parent.name for path in trial.objects.glob("logs/*.parts/*")}
    assert logs == {"process-0.log.parts", "process-1.log.parts"}
    assert not list((tmp_path / "n0").iterdir())


@pytest.mark.slow
def test_split_job_in_a_bucket_only_the_newer_half_publishes(tmp_path, undisturbed_hash):
    with hosts(3) as (first, second, third):
        trial = Trial(tmp_path, 0, third)
        older = trial.start(first, "1:2", meet_at=first.address)
        trial.reaches(2, older)
        set_pace(trial.pace, 4)  # so that it still runs when the other one starts
        newer = trial.start(second, "1:2", meet_at=second.address)  # same job and bucket, separate rendezvous
        older.wait()
        assert older.process.returncode != 0
        assert "started again" in older.output
        claim = json.loads((trial.objects / "checkpoints" / "attempt-0002.json").read_text())
        last = max(name.samples for name in trial.checkpoints() if name.generation == 1)
        assert last <= CheckpointName.parse(claim["parent"]).samples + ITERATION  # one save may be in progress
        set_pace(trial.pace, 0)
        ends_well(newer)
    assert trial.hash() == undisturbed_hash


def test_hang_report_of_a_run_in_a_bucket_is_uploaded(s3, tmp_path):
    (tmp_path / URL_FILE).write_text(f"{s3.url}/runs/run")
    write_report(tmp_path, "process 1 made no progress", seconds=30.0)
    assert Bucket(f"{s3.url}/runs/run").read("hang.txt") == b"process 1 made no progress\n"
    s3.fault = lambda request: "error"
    write_report(tmp_path, "it is not answered", seconds=30.0)  # returns, and raises nothing
