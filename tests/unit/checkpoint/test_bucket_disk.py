"""Runs in a bucket, in this process: equal results, a kill at every request of a save, and what a save costs."""

from collections import Counter
from contextlib import suppress
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from helpers.tiny_recipes import ITERATION, hash_of, tiny
from lockstep.bucket import client
from lockstep.bucket.client import Bucket
from lockstep.bucket.working_directory import CACHE, cache_directory
from lockstep.bucket_copy import copy_run
from lockstep.checkpoint.bucket_disk import BucketDisk
from lockstep.checkpoint.fencing import GenerationFence, SupersededError
from lockstep.checkpoint.lineage import find, list_checkpoints
from lockstep.config import ConfigError, apply_overrides
from lockstep.registry import find_recipe
from lockstep.training_loop import train

REPLAY = {
    "task.id": "Pendulum-v1",
    "algo": {"encoder": {"hidden_sizes": 8, "num_layers": 1}, "batch_size": 16, "learning_starts": 64},
    "run": {"total_samples": 512, "save_every": 128, "eval_every": None, "device": "cpu", "record_video": False},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.0)


def objects_of(url):
    """Return the content of all objects below a URL, by key."""
    return {key: Bucket(url).read(key) for key in Bucket(url).find("")}


def hash_in_bucket(url, directory, at=None):
    directory.mkdir()
    copy_run(url, directory, "all")
    return hash_of(directory, at)


def newest(url, directory):
    """Return the newest checkpoint, after a check of its files."""
    disk = BucketDisk(Bucket(url), directory / "checkpoints")
    return find(directory / "checkpoints", disk=disk)


def test_run_in_a_bucket_equals_the_local_one_also_after_a_resume(memory_url, tmp_path):
    train(tiny(tmp_path))
    whole = tiny(memory_url)
    train(whole, stop_at=2 * ITERATION)
    train(whole, resume=True)
    assert hash_in_bucket(f"{memory_url}/run", tmp_path / "copy") == hash_of(tmp_path / "run")
    for log in ("metrics.jsonl", "digests.jsonl"):
        lines, copies = ((tmp_path / run / log).read_text().splitlines() for run in ("run", "copy"))
        assert len(lines) == len(copies)
    assert (tmp_path / "copy" / "digests.jsonl").read_text() == (tmp_path / "run" / "digests.jsonl").read_text()
    assert not list(cache_directory().iterdir())
    assert "runs_dir: memory://" in (tmp_path / "copy" / "config.yaml").read_text()


def test_name_in_use_is_refused_and_automatic_names_differ(memory_url):
    train(tiny(memory_url, total_samples=ITERATION))
    with pytest.raises(ConfigError, match=r"/run already contains a run.\nResume it: lockstep resume memory://"):
        train(tiny(memory_url, total_samples=ITERATION))
    for _ in range(2):
        train(tiny(memory_url, name="", total_samples=ITERATION))
    assert len([name for name in Bucket(memory_url).list().folders if not name.startswith(".")]) == 3


def test_new_run_that_fails_before_training_leaves_nothing(memory_url, monkeypatch):
    monkeypatch.setattr("lockstep.algorithms.ppo.PPOConfig.check_task", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny(memory_url))
    assert Bucket(memory_url).find("") == {}


class Dead(PermissionError):
    """The process is gone: no request of it arrives any more."""


@pytest.fixture
def requests(monkeypatch):
    """Names of requests that change the bucket. After `requests.limit` of them, none is carried out."""
    call = Bucket._call

    class Requests(list):
        limit = None

    made = Requests()

    def counted(self, method, *arguments, **settings):
        if method in ("pipe_file", "put_file", "rm_file"):
            if made.limit is not None and len(made) >= made.limit:
                raise Dead
            made.append(method)
        return call(self, method, *arguments, **settings)

    monkeypatch.setattr(Bucket, "_call", counted)
    return made


def test_kill_at_every_request_of_a_save_leaves_a_whole_checkpoint(memory_url, tmp_path, requests):
    train(tiny(tmp_path, keep_last=2))
    wanted = hash_of(tmp_path / "run")
    before = f"{memory_url}/before"
    train(tiny(before, keep_last=2), stop_at=2 * ITERATION)
    stopped = objects_of(before)
    requests.clear()
    resumed_from, samples, number = set(), [], 0
    while True:
        url = f"{memory_url}/{number}"
        requests.limit = None
        for key, content in stopped.items():
            Bucket(url).put(key, content)
        requests.clear()
        requests.limit = number
        recipe = tiny(url, keep_last=2)
        with suppress(ConfigError, Dead):
            train(recipe, resume=True, stop_at=3 * ITERATION)
        if len(requests) < number:  # nothing was refused
            break
        requests.limit = None
        name, notes = newest(f"{url}/run", tmp_path / f"look-{number}")
        assert not notes, f"a damaged checkpoint was published: {notes}"
        samples.append(name.samples // ITERATION)
        left = frozenset(objects_of(url).items())
        if left not in resumed_from and number % 4 == 0:  # a sample: each takes most of a second
            resumed_from.add(left)
            train(recipe, resume=True)
            assert hash_in_bucket(f"{url}/run", tmp_path / f"copy-{number}") == wanted
        number += 1
    assert len(samples) > 15
    assert samples == sorted(samples)
    assert set(samples) == {2, 3}


def test_lost_host_between_upload_and_commit_leaves_objects_that_the_next_save_removes(memory_url, requests):
    recipe = tiny(memory_url, keep_last=1)
    train(recipe, stop_at=ITERATION)
    disk = BucketDisk(Bucket(f"{memory_url}/run"), None)
    disk.bucket.put("checkpoints/000000000256-g0001/lanes-0000-0007.safetensors", b"half")
    disk.bucket.put("checkpoints/segments/00-replay-0000-0007-0-10.safetensors", b"unused")
    train(recipe, resume=True)
    keys = set(disk.bucket.find("checkpoints"))
    assert not any("segments/" in key or "0256-g0001" in key for key in keys)
    folders = {key.split("/")[1] for key in keys if key.count("/") == 2}
    assert len(folders) == 2  # the newest, and the parent of this start


def test_deletion_that_fails_after_the_last_save_is_repeated(memory_url, monkeypatch, caplog):
    call, failures = Bucket._call, []

    def failing(self, method, *arguments, **settings):
        if method == "rm" and list_names(memory_url, 4) and len(failures) < client.ATTEMPTS:
            failures.append(method)
            raise ConnectionError("the storage does not answer")
        return call(self, method, *arguments, **settings)

    def list_names(url, iterations):
        return [key for key in MemoryFileSystem().find(url) if f"{iterations * ITERATION:012}-g0001.json" in key]

    monkeypatch.setattr(Bucket, "_call", failing)
    train(tiny(memory_url, keep_last=1))
    assert len(failures) == client.ATTEMPTS
    assert "deleting old checkpoints failed" in caplog.text
    folders = {key.split("/")[1] for key in Bucket(f"{memory_url}/run").find("checkpoints") if key.count("/") == 2}
    assert folders == {f"{4 * ITERATION:012}-g0001"}


def test_pointer_to_the_best_checkpoint_that_fails_is_written_after_the_next_save(memory_url, monkeypatch, caplog):
    call, failures = Bucket._call, []

    def failing(self, method, path, *arguments, **settings):
        if method == "pipe_file" and path.endswith("/best") and len(failures) < client.ATTEMPTS:
            failures.append(path)
            raise ConnectionError("the storage does not answer")
        return call(self, method, path, *arguments, **settings)

    monkeypatch.setattr(Bucket, "_call", failing)
    train(tiny(memory_url, keep_last=1, eval_every=2 * ITERATION, eval_episodes=8), stop_at=3 * ITERATION)
    assert "updating pointers" in caplog.text
    bucket = Bucket(f"{memory_url}/run")
    assert bucket.read("checkpoints/best").decode() == f"{2 * ITERATION:012}-g0001"
    assert bucket.exists(f"checkpoints/{2 * ITERATION:012}-g0001.json")


def replay_recipe(url, **run):
    recipe = apply_overrides(find_recipe("gym-ddpg")(), REPLAY)
    return apply_overrides(recipe, {"run": {"runs_dir": str(url), "name": "run", "keep_last": 2, **run}})


def test_replay_segments_are_uploaded_once_and_a_save_costs_what_was_added(memory_url, tmp_path, monkeypatch):
    uploads = Counter()
    upload = Bucket.upload

    def counted(self, path, key):
        uploads[key] += path.stat().st_size
        upload(self, path, key)

    monkeypatch.setattr(Bucket, "upload", counted)
    train(replay_recipe(tmp_path))
    train(replay_recipe(memory_url), stop_at=256)
    train(replay_recipe(memory_url), resume=True)
    assert hash_in_bucket(f"{memory_url}/run", tmp_path / "copy") == hash_of(tmp_path / "run")
    segments = {key: size for key, size in uploads.items() if "segments/" in key}
    stored = Bucket(f"{memory_url}/run").find("checkpoints/segments")
    assert len(segments) == 4
    assert segments == stored  # each was uploaded once, and the newest checkpoint needs all of them
    assert not any(".parity" in key for key in stored)


def test_damaged_object_is_found_and_the_previous_checkpoint_used(memory_url, tmp_path):
    train(tiny(tmp_path))
    recipe = tiny(memory_url)
    train(recipe, stop_at=3 * ITERATION)
    bucket = Bucket(f"{memory_url}/run")
    newest_key = max(key for key in bucket.find("checkpoints") if key.endswith("shared.safetensors"))
    content = bytearray(bucket.read(newest_key))
    content[-1] ^= 1
    bucket.put(newest_key, bytes(content))
    name, notes = newest(f"{memory_url}/run", tmp_path / "look")
    assert name.samples == 2 * ITERATION
    assert "SHA-256 differs" in notes[0]
    bucket.delete(newest_key)
    name, notes = newest(f"{memory_url}/run", tmp_path / "look again")
    assert "is missing" in notes[0]
    train(recipe, resume=True)
    assert hash_in_bucket(f"{memory_url}/run", tmp_path / "copy") == hash_of(tmp_path / "run")


def test_older_start_publishes_nothing_that_counts_after_a_newer_one(memory_url, tmp_path):
    recipe = tiny(memory_url)
    train(recipe, stop_at=ITERATION)
    disk = BucketDisk(Bucket(f"{memory_url}/run"), tmp_path / "checkpoints")
    disk.bucket.create("checkpoints/attempt-0002.json", b'{"parent": "000000000128-g0001", "host": "other", "pid": 7}')
    with pytest.raises(SupersededError, match="started again"):
        train_as_generation(recipe, 1)
    assert [name.generation for name in list_checkpoints(disk.directory, disk)] == [1]


def train_as_generation(recipe, generation):
    """Continue a run as its older start, which does not know of the newer one yet."""

    def confirm(self, chosen, problems):
        self.generation, self.settled = generation, True
        return chosen, []

    with patch.object(GenerationFence, "confirm", confirm):
        train(recipe, resume=True)


@pytest.fixture(autouse=True)
def _empty_memory():
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
