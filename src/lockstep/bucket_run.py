"""A run in a bucket: claim its name, give it a working directory on every host, and upload what is written to it."""

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lockstep.bucket.claim import claim_name
from lockstep.bucket.client import Bucket
from lockstep.bucket.mirror import SECONDS, Mirror, download, is_log
from lockstep.bucket.urls import is_run_name, join, split_run_url
from lockstep.bucket.working_directory import URL_FILE, working_directory
from lockstep.checkpoint.bucket_disk import BucketDisk
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.format import lane_file
from lockstep.config import ConfigError, Recipe
from lockstep.distributed import Runtime
from lockstep.io.jsonl import CHECKPOINTS, CONFIG, HEARTBEATS, LOGS, STATUS
from lockstep.io.safe_read import parse_json
from lockstep.launch.world import AUTO_JOB, warn_user
from lockstep.run_name import automatic_name

JOBS = ".jobs"
"""Folder next to the runs with the name of the run of each job, so that a restart of the job finds it."""
_VISIBLE = "visible"
_LOGGER = logging.getLogger("lockstep")


class BucketRun:
    """The run of this process in a bucket, and its working directory on this host."""

    def __init__(self, url: str, path: Path, start: str, runtime: Runtime) -> None:
        self.url, self.path, self.start, self.runtime = url, path, start, runtime
        self.heartbeats = path / HEARTBEATS / start
        self.disk = BucketDisk(Bucket(url, runtime.watchdog.note_progress), path / CHECKPOINTS)
        # Uploads of logs have a connection of their own: they must not count as progress of the training.
        self.mirror = Mirror(path, Bucket(url), self._is_own_file)
        self._fence: GenerationFence | None = None

    @classmethod
    @contextmanager
    def open(cls, recipe: Recipe, runtime: Runtime, resume: bool, status: str) -> Iterator["BucketRun"]:
        """Claim the name of a new run with its first status, or open the run to resume, on all processes."""
        url, start = runtime.run_on_main(lambda: _claim(recipe, runtime.job_id, resume, status))
        _, name = split_run_url(url)
        with ExitStack() as on_exit:
            path = on_exit.enter_context(working_directory(f"{name}-{start}")) / name
            for folder in (HEARTBEATS, f"{HEARTBEATS}/{start}", CHECKPOINTS):
                (path / folder).mkdir(parents=True, exist_ok=True)
            (path / URL_FILE).write_text(url)
            run = cls(url, path, start, runtime)
            runtime.run_on_main(run._download_logs)
            yield run

    def has_common_directory(self) -> bool:
        """Return whether all processes of the run see this working directory, because they are on one host."""
        if self.runtime.is_main:
            (self.heartbeats / _VISIBLE).touch()
        self.runtime.all_gather_json(None)  # no process looks before the file exists
        return all(self.runtime.all_gather_json((self.heartbeats / _VISIBLE).exists()))

    def upload_config(self) -> None:
        """Make a new run visible to others."""
        self.mirror.bucket.upload(self.path / CONFIG, CONFIG)

    def sync_logs(self) -> None:
        """Upload the lines written so far, before a checkpoint that covers them is published."""
        try:
            self.mirror.flush()
        except OSError as error:
            _LOGGER.warning("The log of %s may miss lines: %s.", self.url, error)

    def begin(self, fence: GenerationFence) -> None:
        """Upload files in the background from now on, until a newer start takes over the run."""
        self._fence = fence
        if self.runtime.is_main:
            self.mirror.begin(fence.generation, fence.superseded)
        else:  # all of them together make about one request per second
            self.mirror.begin(fence.generation, lambda: False, SECONDS * max(1.0, self.runtime.size / SECONDS))

    def close(self, failed_new_run: bool) -> None:
        """Upload the last changes. Remove a new run that failed before it claimed a generation."""
        self.mirror.stop()
        try:
            if self._fence is not None and self._fence.superseded_by:
                for path in self.path.glob("superseded-*.json"):
                    self.mirror.bucket.upload(path, path.name)
            elif self._fence is not None:
                self.mirror.flush()
            elif failed_new_run and self.runtime.is_main and not self.mirror.bucket.list(CHECKPOINTS).objects:
                self.mirror.bucket.delete_all("")
        except OSError as error:
            warn_user(f"the end of the log could not be uploaded: {error}.")

    def _download_logs(self) -> None:
        download(self.mirror.bucket, self.path, lambda name: "/" not in name and (is_log(name) or _is_text(name)))

    def _is_own_file(self, name: str) -> bool:
        """Return whether this process uploads a file. The main process uploads all but the logs of the others."""
        if self.runtime.is_main and not name.startswith(f"{LOGS}/"):
            return True
        # Its log, and its part of a dump of non-finite values.
        return name.endswith((f"{LOGS}/process-{self.runtime.rank}.log", lane_file(self.runtime.lanes.local)))


def _claim(recipe: Recipe, job: str, resume: bool, status: str) -> tuple[str, str]:
    """Return the URL of the run to train, and a name for this start."""
    start = uuid.uuid4().hex[:8]
    try:
        runs = Bucket(recipe.run.runs_dir)
        name = _name_of_job(runs, recipe, job)
        if name is None and resume:
            name = recipe.run.name
            if not runs.exists(f"{name}/{CONFIG}"):
                raise ConfigError(f"{runs.url}/{name} is not a run: it has no {CONFIG}.", f"lockstep ls {runs.url}")
        return join(runs.url, name or _create(runs, recipe, job, start, status)), start
    except OSError as error:
        raise ConfigError(
            f"{recipe.run.runs_dir} cannot be used: {error}.",
            "Check the name of the bucket, the credentials in the environment, and the network.",
        ) from None


def _name_of_job(runs: Bucket, recipe: Recipe, job: str) -> str | None:
    """Return the run that a job started, also if its name was generated."""
    if not job:
        return None
    with suppress(FileNotFoundError, ValueError):
        name = recipe.run.name or runs.read(_marker(job)).decode()
        status = parse_json(runs.read(f"{name}/{STATUS}").decode())
        if is_run_name(name) and isinstance(status, dict) and status.get("job") == job:
            finished = status.get("state") == "finished"
            return None if finished and job.startswith(AUTO_JOB) else name
    return None


def _create(runs: Bucket, recipe: Recipe, job: str, start: str, status: str) -> str:
    """Create a new run with its first status. No other start can get the same name."""

    def leave_marker(name: str) -> None:
        if job and not recipe.run.name:
            runs.put(_marker(job), name.encode())

    name, numbered = recipe.run.name or automatic_name(recipe), not recipe.run.name
    return claim_name(runs, name, numbered, json.loads(status) | {"start": start}, leave_marker)


def _marker(job: str) -> str:
    return f"{JOBS}/{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def _is_text(name: str) -> bool:
    return name.endswith((".json", ".yaml"))
