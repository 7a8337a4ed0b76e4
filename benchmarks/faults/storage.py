"""Where a campaign keeps its runs: a directory, or a bucket on an S3 server (moto) of its own."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from hosts import Host

from faults import TESTS
from helpers.s3_server import CREDENTIALS
from lockstep.bucket.client import Bucket
from lockstep.bucket_copy import copy_run
from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find, list_checkpoints
from lockstep.checkpoint.naming import CheckpointName

RELAY = [sys.executable, str(Path(__file__).with_name("relay.py"))]
HOST_PORT = 9000
"""Port of the storage on its host."""


class Storage(Protocol):
    """Storage of runs, by name."""

    runs_dir: str
    """Value of `run.runs_dir`."""

    def has_config(self, name: str) -> bool:
        """Return whether a run can be resumed."""

    def checkpoints(self, name: str) -> list[CheckpointName]:
        """Return all published checkpoints, of all generations."""

    def is_saving(self, name: str) -> bool:
        """Return whether a checkpoint is partly written."""

    def damage(self, name: str, chance: random.Random) -> None:
        """Flip one bit of a file of the newest checkpoint."""

    def fail(self, chance: random.Random) -> None:
        """Make writing fail for some seconds."""

    def hash(self, name: str) -> str: ...

    def remove(self, name: str) -> None: ...

    def leftovers(self, name: str) -> list[str]:
        """Return what a finished run should not have left."""

    def reached_from(self, host: Host) -> AbstractContextManager[None]:
        """Serve the storage on a host, for the others, in the block."""

    def environment_of(self, host: Host) -> dict[str, str]:
        """Return the environment of a host that trains."""

    def stop(self) -> None: ...


class DirectoryStorage:
    """A directory on a small file system, which can be filled."""

    def __init__(self, place: Path) -> None:
        self.place, self.runs_dir = place, str(place)

    def has_config(self, name: str) -> bool:
        return (self.place / name / "config.yaml").exists()

    def checkpoints(self, name: str) -> list[CheckpointName]:
        directory = self.place / name / "checkpoints"
        return list_checkpoints(directory) if directory.is_dir() else []

    def is_saving(self, name: str) -> bool:
        return any((self.place / name / "checkpoints").glob(".*.partial"))

    def damage(self, name: str, chance: random.Random) -> None:
        directory = self.place / name / "checkpoints"
        newest, _ = find(directory)
        path = chance.choice(sorted((directory / str(newest)).iterdir()))
        path.write_bytes(_with_flipped_bit(path.read_bytes(), chance))

    def fail(self, chance: random.Random) -> None:
        filler = self.place / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 2**16)
        except OSError:
            time.sleep(chance.uniform(0.5, 3.0))
        filler.unlink(missing_ok=True)

    def hash(self, name: str) -> str:
        directory = self.place / name / "checkpoints"
        return hash_checkpoint(directory / str(find(directory)[0]))

    def remove(self, name: str) -> None:
        shutil.rmtree(self.place / name, ignore_errors=True)

    def leftovers(self, name: str) -> list[str]:
        directory = self.place / name
        return sorted(str(path.relative_to(directory)) for path in directory.rglob(".*") if path.name != ".lock")

    def reached_from(self, host: Host) -> AbstractContextManager[None]:
        return nullcontext()  # all hosts have the same files

    def environment_of(self, host: Host) -> dict[str, str]:
        return {}

    def stop(self) -> None: ...


class BucketStorage:
    """A bucket. The server writes every object to a file, too, so that this process need not ask it."""

    runs_dir = "s3://bucket/runs"

    def __init__(self, place: Path, port: int) -> None:
        self._port, self._endpoint = port, ""
        self._objects, self._fault = place / "objects", place / "objects.fault"
        self._runs = self._objects / "bucket" / "runs"
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        words = [sys.executable, "-m", "helpers.s3_server", str(port), "bucket", str(self._objects)]
        self.server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
        assert self.server.stdout is not None
        assert self.server.stdout.readline(), "the server did not start"
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ.update(endpoint | CREDENTIALS | {"LOCKSTEP_CACHE_DIR": str(place / "cache")})

    def has_config(self, name: str) -> bool:
        return (self._runs / name / "config.yaml").exists()

    def checkpoints(self, name: str) -> list[CheckpointName]:
        names = (path.stem for path in (self._runs / name / "checkpoints").glob("*.json"))
        return [checkpoint for checkpoint in map(CheckpointName.parse, names) if checkpoint]

    def is_saving(self, name: str) -> bool:
        published = set(map(str, self.checkpoints(name)))
        folders = (self._runs / name / "checkpoints").glob("*-g*/")
        return any(folder.name not in published and any(folder.iterdir()) for folder in folders)

    def damage(self, name: str, chance: random.Random) -> None:
        bucket = Bucket(f"{self.runs_dir}/{name}")
        newest = max(self.checkpoints(name), key=lambda one: (one.generation, one.samples))
        keys = [f"checkpoints/{newest}.json", *bucket.find(f"checkpoints/{newest}")]
        key = chance.choice(sorted(keys))
        bucket.put(key, _with_flipped_bit(bucket.read(key), chance))

    def fail(self, chance: random.Random) -> None:
        partial = self._fault.with_suffix(".partial")
        partial.write_text(chance.choice(["error", "slow down", "no credentials", "torn", "lost answer", "slow"]))
        partial.rename(self._fault)
        time.sleep(chance.uniform(0.5, 6.0))
        self._fault.unlink()

    def hash(self, name: str) -> str:
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / name
            run.mkdir()
            copy_run(f"{self.runs_dir}/{name}", run, "all")
            checkpoints = run / "checkpoints"
            return hash_checkpoint(checkpoints / str(find(checkpoints)[0]))

    def remove(self, name: str) -> None:
        Bucket(f"{self.runs_dir}/{name}").delete_all("")

    def leftovers(self, name: str) -> list[str]:
        """Return unfinished checkpoints, and replay segments that no checkpoint names."""
        bucket = Bucket(f"{self.runs_dir}/{name}")
        published = set(map(str, self.checkpoints(name)))
        manifests = [json.loads(bucket.read(f"checkpoints/{checkpoint}.json")) for checkpoint in published]
        digests = {digest[:32] for manifest in manifests for digest in manifest["files"].values()}
        left = []
        for key in bucket.find("checkpoints"):
            folder, _, file = key.removeprefix("checkpoints/").rpartition("/")
            is_known = file[:32] in digests if folder == "segments" else folder in published
            if folder and not is_known:
                left.append(key)
        return sorted(left)

    @contextmanager
    def reached_from(self, host: Host) -> Iterator[None]:
        socket = str(self._objects.with_suffix(".socket"))
        outside = subprocess.Popen([*RELAY, f"unix:{socket}", f"tcp:{self._port}"])
        try:
            host.start([*RELAY, f"tcp:{HOST_PORT}", f"unix:{socket}"])
            self._endpoint = f"http://{host.name}:{HOST_PORT}"
            yield
        finally:
            outside.kill()
            outside.wait()
            Path(socket).unlink(missing_ok=True)

    def environment_of(self, host: Host) -> dict[str, str]:
        cache = self._objects.with_name(f"cache-{host.name}")
        return {"AWS_ENDPOINT_URL": self._endpoint, "LOCKSTEP_CACHE_DIR": str(cache)}

    def stop(self) -> None:
        self.server.kill()


def _with_flipped_bit(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
